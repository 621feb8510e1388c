"""`tfdist.notebook_launch`: a function of a notebook's cell on several workers of this host."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import cloudpickle

from tfdist.errors import LaunchError
from tfdist.launcher import notebook_worker
from tfdist.launcher.signals import signals_raise
from tfdist.launcher.worker_pool import WorkerPool


def notebook_launch(
    fn: Callable[..., Any],
    num_workers: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Calls a function on workers of their own, and shows what rank 0 prints as it comes.

    Each worker is a new Python process that knows the others, as `python -m tfdist.launch` starts
    them: what the function uses has to be in the function, in what it refers to, or importable.
    This notebook's own TensorFlow stays as it is.

    Args:
        fn: Makes its model and its `tfdist.Trainer` inside, with a strategy of several processes.
            It may be defined in a cell.
        num_workers: How many.
        args: What it is called with, the same in each worker.
        kwargs: The same by name.

    Returns:
        What rank 0 returned; it has to be something that pickle takes.

    Raises:
        LaunchError: A worker failed; its traceback is part of the message. Or the function takes
            something with it that cannot go.
        KeyboardInterrupt: The kernel was interrupted; the workers have ended.
    """
    if num_workers < 1:
        raise LaunchError(f"num_workers={num_workers}: expected at least 1.")
    question = _carried(functools.partial(fn, *args, **kwargs))
    pool = WorkerPool(
        notebook_worker.make_answer, num_workers=num_workers, answer_seconds=None, shows=0
    )
    with signals_raise(), pool:
        returned = pool.ask(question)[0]
        pool.finish()
    return cloudpickle.loads(returned)


def _carried(call: Callable[[], Any]) -> bytes:
    """Returns a call as it goes to the workers, with all that it refers to.

    Raises:
        LaunchError: That is no thing to carry.
    """
    written = io.BytesIO()
    try:
        _Pickler(written).dump(call)
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(
            f"The function, or what it refers to, cannot go to the workers ({error}): make that "
            "inside the function."
        ) from error
    return written.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Refuses what would start TensorFlow in a worker as it arrives, before a strategy does."""

    def reducer_override(self, obj: Any) -> Any:
        keras, tf = sys.modules.get("keras"), sys.modules.get("tensorflow")
        kinds = (keras.Layer, keras.Optimizer, keras.Variable) if keras else ()
        kinds += (tf.Tensor, tf.Variable, tf.data.Dataset) if tf else ()
        if isinstance(obj, kinds):
            raise LaunchError(
                f"The function takes a {type(obj).__name__} of this notebook with it, which would "
                "start TensorFlow before the strategy does: make it inside the function."
            )
        return super().reducer_override(obj)
