"""Gradients that tapes of the user's own take of weights that are kept in parts.

What such a weight's `value` returns is made anew whenever it is asked, so that no tape knows it:
its gradient would be None. What a tape has seen are the parts.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.upstream.keras_variables import ELSEWHERE, ShardedVariable, in_parts_alone
from tfdist.upstream.patching import replace

_plain_gradient = tf.GradientTape.__dict__["gradient"]


def know_parts() -> None:
    """Lets `GradientTape.gradient` give the gradient of a whole weight, for good."""
    replace(tf.GradientTape, "gradient", _gradient)


def _gradient(tape: Any, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
    """`GradientTape.gradient`, of the parts where a source is a weight in parts or its value.

    Raises:
        UnsupportedModelError: Other processes have some of the parts.
    """
    flat = tf.nest.flatten(sources)
    weights = [in_parts_alone(source) for source in flat]
    if not any(weight is not None for weight in weights):
        return _plain_gradient(tape, target, sources, *args, **options)
    for weight in weights:
        if weight is not None and not weight.division.has_all:
            raise UnsupportedModelError(f"{weight.path!r} is not whole. {ELSEWHERE}")
    pairs = list(zip(flat, weights, strict=True))
    asked = [source if weight is None else weight.parts for source, weight in pairs]
    found = _plain_gradient(tape, target, asked, *args, **options)
    whole = [
        own if weight is None else _joined(weight, own)
        for own, weight in zip(found, weights, strict=True)
    ]
    return tf.nest.pack_sequence_as(sources, whole)


def _joined(weight: ShardedVariable, pieces: list[Any]) -> tf.Tensor | None:
    """Lays gradients of parts together; None where the target depends on none of them."""
    if all(piece is None for piece in pieces):
        return None
    dense = [
        tf.zeros_like(part) if piece is None else tf.convert_to_tensor(piece)
        for part, piece in zip(weight.parts, pieces, strict=True)
    ]
    return weight.division.join(dense, weight.shape, dense[0].dtype)
