"""What cannot be computed again to the same gradients is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.step.recompute.made import is_float


def num_operations() -> int:
    """Returns how many operations the graph has that is being traced."""
    if tf.executing_eagerly():
        return 0
    return len(tf.compat.v1.get_default_graph().get_operations())


def check_inputs(
    function: Callable[..., Any], num_before: int, sources: Sequence[tf.Tensor]
) -> None:
    """Refuses what reads tensors that are no inputs, of which gradients would be lost.

    Args:
        function: It.
        num_before: Of operations, when it was called.
        sources: Its inputs, and the variables that it read.

    Raises:
        UnsupportedModelError: It does.
    """
    if tf.executing_eagerly():
        return
    new = tf.compat.v1.get_default_graph().get_operations()[num_before:]
    known = {op.name for op in new} | {source.op.name for source in sources}
    for tensor in (tensor for op in new for tensor in op.inputs):
        is_fixed = tensor.op.type in ("Const", "Placeholder") or not is_float(tensor)
        check(
            function,
            is_fixed or tensor.op.name in known,
            f"reads {tensor.name!r}, which is none of its inputs",
        )


def check(function: Callable[..., Any], holds: bool, why: str) -> None:
    """Refuses a function unless something holds.

    Raises:
        UnsupportedModelError: It does not, which is why.
    """
    if holds:
        return
    layer = getattr(function, "__self__", function)
    name = getattr(layer, "name", getattr(function, "__name__", "a function"))
    raise UnsupportedModelError(
        f"{name!r} cannot be computed again on the way back, for it {why}: leave it out of "
        "recompute=, or of keras.RematScope."
    )
