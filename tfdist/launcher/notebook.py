"""`tfdist.notebook_launch`: a function of a notebook's cell on several workers of this host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle

from tfdist.errors import LaunchError
from tfdist.launcher import notebook_worker
from tfdist.launcher.group import signals_raise
from tfdist.launcher.worker_pool import WorkerPool


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
    pool = WorkerPool(
        notebook_worker.make_answer, num_workers=num_workers, answer_seconds=None, shows=0
    )
    with signals_raise(), pool:
        returned = pool.ask(cloudpickle.dumps(fn))[0]
        pool.finish()
    return cloudpickle.loads(returned)
