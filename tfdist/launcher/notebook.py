"""`tfdist.notebook_launch`: a function of a notebook's cell on several workers of this host."""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from tfdist.errors import LaunchError
from tfdist.launcher import group, notebook_worker, workers
from tfdist.launcher.child import Streams
from tfdist.launcher.plan import LOCAL, slots

_GRACE_SECONDS = 15.0


def notebook_launch(fn: Callable[[], Any], num_workers: int = 2) -> Any:
    """Calls a function on workers of their own, and shows what rank 0 prints as it comes.

    Each worker is a new Python process that knows the others, as `python -m tfdist.launch` starts
    them: what the function uses has to be in the function, in what it refers to, or importable.
    This notebook's own TensorFlow stays as it is.

    Args:
        fn: Takes nothing, and makes its `tfdist.Trainer` inside, with a strategy of several
            processes. It may be defined in a cell.
        num_workers: How many.

    Returns:
        What rank 0 returned; it has to be something that pickle takes.

    Raises:
        LaunchError: A worker failed; its traceback is part of the message.
        KeyboardInterrupt: The kernel was interrupted; the workers have ended.
    """
    if num_workers < 1:
        raise LaunchError(f"num_workers={num_workers}: expected at least 1.")
    with tempfile.TemporaryDirectory(prefix="tfdist-") as name:
        task, result = Path(name, "task"), Path(name, "result")
        task.write_bytes(pickle.dumps(sys.path) + cloudpickle.dumps(fn))
        places = slots({LOCAL: num_workers})
        command = [sys.executable, "-P", notebook_worker.__file__, str(task), str(result)]
        made = workers.plan(command, places)
        with workers.meeting(made, places):
            failure = group.run(made.processes, grace=_GRACE_SECONDS, streams=Streams(only="0"))
        if failure:
            raise LaunchError(str(failure))
        return cloudpickle.loads(result.read_bytes())
