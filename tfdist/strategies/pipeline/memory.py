"""What each call of a model keeps in memory: told from its graph, of which nothing is computed.

A forward pass keeps what the way back reads, and what it hands to the next call. Loops keep more
than their graph tells: what a recurrent layer keeps of each step is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.strategies.pipeline.inputs import rows_like
from tfdist.strategies.sharded.plan import num_bytes, state_of
from tfdist.upstream.keras_graph import operations_called_through

#: Operations whose output is their first input, seen otherwise.
_ALIASES = ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "IdentityN")
#: That make what is held anyway, or in no time again.
_HELD = ("Const", "Placeholder", "ReadVariableOp", "Shape", "Fill")


class Held(NamedTuple):
    """What a call holds, in bytes.

    Attributes:
        weights: With what the optimizer keeps about them, the sum of their gradients, and those of
            a micro-batch.
        activations: Of a micro-batch, from its way there to its way back.
    """

    weights: float
    activations: float


def held(model: keras.Model, operations: Sequence[keras.Operation], num_rows: int) -> list[Held]:
    """Returns what each call holds, in the order of a forward pass.

    Args:
        model: Built; it stays as it is.
        operations: Of each call.
        num_rows: Of a micro-batch.

    Raises:
        ConfigurationError: Inputs of an unknown shape.
    """
    known = {id(operation) for operation in operations}
    optimizer = getattr(model, "optimizer", None)
    plain = getattr(optimizer, "inner_optimizer", optimizer)
    state = (state_of(plain) or 0.0) if plain is not None else 0.0
    inside, counted, found = [False], set[int](), list[Held]()

    def noted(call: Callable[..., Any], operation: Any, *args: Any, **kwargs: Any) -> Any:
        if inside[0] or id(operation) not in known:
            return call(operation, *args, **kwargs)
        inside[0] = True
        try:
            outputs, activations = _kept(call, operation, args, kwargs)
        finally:
            inside[0] = False
        own = [v for v in getattr(operation, "variables", []) if v.dtype != "string"]
        weights = sum(
            num_bytes(v) * (3.0 + state if v.trainable else 1.0)
            for v in own
            if id(v) not in counted
        )
        counted.update(map(id, own))
        found.append(Held(weights, activations))
        return outputs

    def forward() -> None:
        inputs = [rows_like(spec, num_rows, "memory") for spec in model.inputs]
        with keras.StatelessScope(), operations_called_through(noted):
            model(inputs if len(inputs) > 1 else inputs[0], training=True)

    tf.function(forward, autograph=False).get_concrete_function()
    return found


def _kept(call: Callable[..., Any], operation: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Traces a call with its way back; returns what it returned, and the bytes that it keeps."""
    graph = tf.compat.v1.get_default_graph()
    entering = [t for t in keras.tree.flatten((args, kwargs)) if _has_gradient(t)]
    begin = len(graph.get_operations())
    outputs = call(operation, *args, **kwargs)
    there = {op.name for op in graph.get_operations()[begin:]}
    made = [t for t in keras.tree.flatten(outputs) if _has_gradient(t)]
    weights = [v.value for v in getattr(operation, "trainable_variables", [])]
    end = len(graph.get_operations())
    if made and (entering or weights):
        total = [tf.reduce_sum(tensor) for tensor in made]
        tf.gradients(total, [*entering, *weights], stop_gradients=entering)
    read = [t for op in graph.get_operations()[end:] for t in op.inputs]
    kept = {origin.ref(): origin for origin in map(_origin, [*made, *read])}
    return outputs, sum(
        math.prod(size or 1 for size in tensor.shape) * tensor.dtype.size
        for tensor in kept.values()
        if tensor.op.name in there and tensor.op.type not in _HELD and tensor.shape.rank is not None
    )


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that another is, seen otherwise."""
    while tensor.op.type in _ALIASES and len(tensor.op.inputs):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating
