"""`tfdist.notebook_launch`: runs a function from a notebook on several workers on this host."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import cloudpickle

from tfdist import cluster
from tfdist.cluster.launcher.processes import signals_raise
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.errors import LaunchError


def notebook_launch(
    fn: Callable[..., Any],
    num_workers: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Runs a function on several new workers, and prints the output of rank 0.

    Each worker is a new Python process, started as by `python -m tfdist.launch`. The function and
    everything it refers to are pickled; modules must be importable. TensorFlow in this notebook is
    not affected.

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
        fn: The function, which creates a model and a `tfdist.Trainer` with a multi-process
            strategy. It may be defined in a notebook cell.
        num_workers: Number of workers.
        args: Positional arguments of the function, the same in each worker.
        kwargs: Keyword arguments of the function.

    Returns:
        The return value of the function on rank 0, which must be picklable.

    Raises:
        LaunchError: A worker failed (the message has its traceback), or the function refers to
            something that cannot be pickled.
        KeyboardInterrupt: The kernel was interrupted. All workers have ended.
    """
    if num_workers < 1:
        raise LaunchError(f"num_workers={num_workers}: expected at least 1.")
    request = pickled_call(functools.partial(fn, *args, **kwargs))
    pool = WorkerPool(make_handler, num_workers=num_workers, timeout_seconds=None, shows=0)
    with signals_raise(), pool:
        returned = pool.ask(request)[0]
        pool.finish()
    return cloudpickle.loads(returned)


def pickled_call(call: Callable[[], Any]) -> bytes:
    """Pickles a call with everything that it refers to, for the workers.

    Raises:
        LaunchError: The call cannot be pickled.
    """
    written = io.BytesIO()
    try:
        _Pickler(written).dump(call)
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(
            f"The function refers to an object that cannot be pickled ({error}). Create it inside "
            "the function."
        ) from error
    return written.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Refuses objects that would initialize TensorFlow in a worker before the strategy does."""

    def reducer_override(self, obj: Any) -> Any:
        keras, tf = sys.modules.get("keras"), sys.modules.get("tensorflow")
        kinds = (keras.Layer, keras.Optimizer, keras.Variable) if keras else ()
        kinds += (tf.Tensor, tf.Variable, tf.data.Dataset) if tf else ()
        if isinstance(obj, kinds):
            raise LaunchError(
                f"The function refers to a {type(obj).__name__} of this notebook, which would "
                "initialize TensorFlow before the strategy does. Create it inside the function."
            )
        return super().reducer_override(obj)


def make_handler() -> Callable[[bytes], bytes | None]:
    """Returns the function that a worker calls for each request."""
    return _call


def _call(function: bytes) -> bytes | None:
    returned = cloudpickle.loads(function)()
    cluster.end()
    if not cluster.is_chief():
        return None
    return pickled_result(returned)


def pickled_result(returned: Any) -> bytes:
    """Pickles the return value of a function in a worker.

    Raises:
        TypeError: The value cannot be pickled.
    """
    try:
        return cloudpickle.dumps(returned)
    except Exception as error:
        raise TypeError(
            f"The function returned {type(returned).__name__}, which cannot be pickled. Return "
            "numbers or arrays, or save the result to a file."
        ) from error
