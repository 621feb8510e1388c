"""`tfdist.notebook_launch`: runs a function of a notebook on several workers of this host."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import cloudpickle

from tfdist import cluster
from tfdist.errors import LaunchError
from tfdist.launcher.processes import signals_raise
from tfdist.launcher.worker_pool import WorkerPool


def notebook_launch(
    fn: Callable[..., Any],
    num_workers: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Calls a function on several new workers, and shows what rank 0 prints.

    Each worker is a new Python process, started as by `python -m tfdist.launch`. Everything that
    the function uses has to be in the function, in what it refers to, or importable. TensorFlow in
    this notebook is not affected.

    Example:
        >>> def train():
        ...     import tfdist
        ...     from my_package import build_model, x, y
        ...
        ...     trainer = tfdist.Trainer(build_model, strategy="multi_worker")
        ...     trainer.fit(x, y, batch_size=64, verbose=0)
        ...     return tfdist.size()
        >>> tfdist.notebook_launch(train, num_workers=2)
        2

    Args:
        fn: Creates its model and its `tfdist.Trainer`, with a strategy of several processes. It may
            be defined in a cell.
        num_workers: Number of workers.
        args: Positional arguments of the function, the same in each worker.
        kwargs: Keyword arguments of the function.

    Returns:
        What the function returned on rank 0; it must be picklable.

    Raises:
        LaunchError: A worker failed (the message has its traceback), or the function refers to
            something that cannot be pickled.
        KeyboardInterrupt: The kernel was interrupted; the workers have ended.
    """
    if num_workers < 1:
        raise LaunchError(f"num_workers={num_workers}: expected at least 1.")
    question = pickled_call(functools.partial(fn, *args, **kwargs))
    pool = WorkerPool(make_answer, num_workers=num_workers, answer_seconds=None, shows=0)
    with signals_raise(), pool:
        returned = pool.ask(question)[0]
        pool.finish()
    return cloudpickle.loads(returned)


def pickled_call(call: Callable[[], Any]) -> bytes:
    """Returns a call with everything that it refers to, pickled for the workers.

    Raises:
        LaunchError: It cannot be pickled.
    """
    written = io.BytesIO()
    try:
        _Pickler(written).dump(call)
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(
            f"The function refers to something that cannot be pickled ({error}): create it inside "
            "the function."
        ) from error
    return written.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Refuses objects that would start TensorFlow in a worker before a strategy does."""

    def reducer_override(self, obj: Any) -> Any:
        keras, tf = sys.modules.get("keras"), sys.modules.get("tensorflow")
        kinds = (keras.Layer, keras.Optimizer, keras.Variable) if keras else ()
        kinds += (tf.Tensor, tf.Variable, tf.data.Dataset) if tf else ()
        if isinstance(obj, kinds):
            raise LaunchError(
                f"The function refers to a {type(obj).__name__} of this notebook, which would "
                "start TensorFlow before the strategy does: create it inside the function."
            )
        return super().reducer_override(obj)


def make_answer() -> Callable[[bytes], bytes | None]:
    """Returns the function that a worker calls for each question of the pool."""
    return _call


def _call(function: bytes) -> bytes | None:
    """Calls a pickled function in a worker, and returns its pickled result on rank 0."""
    returned = cloudpickle.loads(function)()
    cluster.end()
    if not cluster.is_chief():
        return None
    return pickled_result(returned)


def pickled_result(returned: Any) -> bytes:
    """Returns what a function returned in a worker, pickled for the process that called it.

    Raises:
        TypeError: It cannot be pickled.
    """
    try:
        return cloudpickle.dumps(returned)
    except Exception as error:
        raise TypeError(
            f"The function returned {type(returned).__name__}, which cannot be pickled: return "
            "numbers or arrays, or save to a file."
        ) from error
