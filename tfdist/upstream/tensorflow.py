"""What TensorFlow knows of this process: its seed, its device, whether it has started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from tensorflow.python.distribute import values
from tensorflow.python.eager.context import context, global_seed
from tensorflow.python.framework import config as framework_config
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import resource_variable_ops, summary_ops_v2

from tfdist.upstream.patching import replaced


def seed_of_process() -> int | None:
    """Returns the seed that was set, if one was: `context.global_seed`.

    `tf.random.set_seed` has no getter.
    """
    return global_seed()


def computes_in_one_order() -> bool:
    """Tells whether operations have to be deterministic: `config.is_op_determinism_enabled`.

    `tf.config.experimental.enable_op_determinism` has no getter.
    """
    return bool(framework_config.is_op_determinism_enabled())


def summaries_of_this_thread() -> Callable[[], AbstractContextManager[None]]:
    """Returns what lets another thread write the summaries of this one: `_summary_state`.

    The default writer, the step, and whether to record are kept by thread.
    """
    state = summary_ops_v2._summary_state
    names = ("writer", "step", "is_recording")
    kept = {name: getattr(state, name) for name in names}

    @contextmanager
    def as_in_that_thread() -> Iterator[None]:
        before = {name: getattr(state, name) for name in names}
        vars(state).update(kept)
        try:
            yield
        finally:
            vars(state).update(before)

    return as_in_that_thread


def has_started() -> bool:
    """Tells whether this process can no longer join others: `context()._initialized`.

    There is no public way to ask that does not start TensorFlow.
    """
    return bool(context()._initialized)


def before_start(function: Callable[[], object]) -> None:
    """Calls a function when TensorFlow is about to start, unless `start_as_usual` is called first.

    `context().ensure_initialized`, which all operations call: there is no public hook.
    """

    def ensure_initialized() -> None:
        start_as_usual()
        function()
        context().ensure_initialized()

    if not has_started():
        vars(context())["ensure_initialized"] = ensure_initialized


def start_as_usual() -> None:
    """Removes the function of `before_start`."""
    vars(context()).pop("ensure_initialized", None)


@contextmanager
def op_seeds_by(function: Callable[[int], int]) -> Iterator[None]:
    """Lets operations of `tf.random` that are made within have the seed `function(seed)`.

    `random_seed.get_seed`, which gives an operation the same on each worker.
    """
    plain = random_seed.get_seed

    def get_seed(op_seed: int | None) -> tuple[Any, Any]:
        first, second = plain(op_seed)
        return (first, second) if first is None else (function(first), second)

    with replaced(random_seed, "get_seed", get_seed):
        yield


@contextmanager
def variables_assigned_by(function: Callable[..., Any]) -> Iterator[None]:
    """Calls a function where a `tf.Variable` would be assigned to: there is no public hook.

    Of `resource_variable_ops.ResourceVariable`, and `values.DistributedVariable` over several
    devices.
    """
    with ExitStack() as stack:
        for owner in (resource_variable_ops.ResourceVariable, values.DistributedVariable):
            for name in ("assign", "assign_add", "assign_sub"):
                stack.enter_context(replaced(owner, name, function))
        yield


def current_device() -> str:
    """Returns the name of the device of the scopes around the call: `context().device_name`.

    The public `tf.device` sets it alone.
    """
    return context().device_name or ""
