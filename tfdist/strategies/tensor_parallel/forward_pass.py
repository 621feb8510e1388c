"""Which layer takes what another made, and how often each multiplies by its weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.upstream.keras_graph import operations_called_through
from tfdist.upstream.keras_model import build_by_shapes


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        layer: Which.
        inputs: Numbers of the tensors that it takes: the same tensor has the same number.
        outputs: Likewise of those that it returns.
        rank: Of the first input.
        positions: How many vectors of channels an example has in the output; 1 for sizes unknown.
    """

    layer: keras.Operation
    inputs: list[int]
    outputs: list[int]
    rank: int
    positions: int


def calls_of(model: keras.Model) -> list[Call]:
    """Returns the calls of a forward pass in the order in which they end, nested layers' first.

    None where the model has no inputs of known shapes.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return []
    found: list[Call] = []
    inside: list[Any] = []
    tensors: list[tf.Tensor] = []  # kept until the end, so that none gets the id of another

    def note(call: Callable[..., Any], operation: Any, *args: Any, **options: Any) -> Any:
        # Twice for one call; and what is known of a model must not keep it.
        if operation is model or (inside and inside[-1] is operation):
            return call(operation, *args, **options)
        inside.append(operation)
        try:
            outputs = call(operation, *args, **options)
        finally:
            inside.pop()
        taken, made = _tensors((args, options)), _tensors(outputs)
        tensors.extend([*taken, *made])
        rank = taken[0].shape.rank or 0 if taken else 0
        numbers = [id(tensor) for tensor in taken], [id(tensor) for tensor in made]
        found.append(Call(operation, *numbers, rank, _positions(made)))
        return outputs

    with operations_called_through(note):
        # A Sequential has one, and no structure of them.
        build_by_shapes(model, inputs[0] if len(inputs) == 1 else model.input)
    return found


def _positions(outputs: list[tf.Tensor]) -> int:
    shapes = [list(tensor.shape) for tensor in outputs if tensor.shape.rank]
    return max((math.prod(size or 1 for size in shape[1:-1]) for shape in shapes), default=1)


def _tensors(structure: Any) -> list[tf.Tensor]:
    return [leaf for leaf in keras.tree.flatten(structure) if isinstance(leaf, tf.Tensor)]
