"""What the calls of a model hold in memory, which decides how it is split into stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.strategies.sharded.plan import num_bytes, state_of
from tfdist.upstream.keras_layers import operations_called_through
from tfdist.upstream.keras_optimizers import unwrapped

#: Operations whose output is their first input in another view.
_ALIASES = ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "IdentityN")
#: Operations whose output is in memory anyway, or costs nothing to recompute.
_FREE = ("Const", "Placeholder", "ReadVariableOp", "Shape", "Fill")


class HeldBytes(NamedTuple):
    """What a call holds in memory, in bytes.

    Attributes:
        weights: Its weights, their optimizer state, the sum of their gradients, and the gradients
            of one micro-batch.
        activations: What the forward pass of one micro-batch keeps for the backward pass.
    """

    weights: float
    activations: float


def held_bytes_by_call(
    model: keras.Model, operations: Sequence[keras.Operation], num_rows: int
) -> list[HeldBytes]:
    """Estimates what each call holds in memory, in the order of a forward pass.

    The estimate comes from a traced graph; nothing is computed. Loops keep more than their graph
    shows: what a recurrent layer keeps of each time step is not counted.

    Args:
        model: A built model, which is left unchanged.
        operations: The operation of each call.
        num_rows: Rows of a micro-batch.

    Raises:
        ConfigurationError: The shape of an input is not fully known.
    """
    called = {id(operation) for operation in operations}
    optimizer = getattr(model, "optimizer", None)
    plain = unwrapped(optimizer)
    state = (state_of(plain) or 0.0) if plain is not None else 0.0
    inside, counted, held = [False], set[int](), list[HeldBytes]()

    def noted(call: Callable[..., Any], operation: Any, *args: Any, **kwargs: Any) -> Any:
        if inside[0] or id(operation) not in called:
            return call(operation, *args, **kwargs)
        inside[0] = True
        try:
            outputs, activations = _trace_activations(call, operation, args, kwargs)
        finally:
            inside[0] = False
        variables = [v for v in getattr(operation, "variables", []) if v.dtype != "string"]
        weights = sum(
            num_bytes(v) * (3.0 + state if v.trainable else 1.0)
            for v in variables
            if id(v) not in counted
        )
        counted.update(map(id, variables))
        held.append(HeldBytes(weights, activations))
        return outputs

    def forward() -> None:
        inputs = [_random_rows(spec, num_rows) for spec in model.inputs]
        with keras.StatelessScope(), operations_called_through(noted):
            model(inputs if len(inputs) > 1 else inputs[0], training=True)

    tf.function(forward, autograph=False).get_concrete_function()
    return held


def _trace_activations(
    call: Callable[..., Any], operation: Any, args: Any, kwargs: Any
) -> tuple[Any, float]:
    """Traces a call and its backward pass; returns its output and the bytes kept in between."""
    graph = tf.compat.v1.get_default_graph()
    entering = [t for t in keras.tree.flatten((args, kwargs)) if _has_gradient(t)]
    begin = len(graph.get_operations())
    outputs = call(operation, *args, **kwargs)
    forward = {op.name for op in graph.get_operations()[begin:]}
    differentiable = [t for t in keras.tree.flatten(outputs) if _has_gradient(t)]
    weights = [v.value for v in getattr(operation, "trainable_variables", [])]
    end = len(graph.get_operations())
    if differentiable and (entering or weights):
        total = [tf.reduce_sum(tensor) for tensor in differentiable]
        tf.gradients(total, [*entering, *weights], stop_gradients=entering)
    read = [t for op in graph.get_operations()[end:] for t in op.inputs]
    held = {origin.ref(): origin for origin in map(_origin, [*differentiable, *read])}
    return outputs, sum(
        math.prod(size or 1 for size in tensor.shape) * tensor.dtype.size
        for tensor in held.values()
        if tensor.op.name in forward
        and tensor.op.type not in _FREE
        and tensor.shape.rank is not None
    )


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor of which another is only a view."""
    while tensor.op.type in _ALIASES and len(tensor.op.inputs):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating


def _random_rows(spec: keras.KerasTensor, num_rows: int) -> tf.Tensor:
    """Returns rows for a model's input: random floats, integer zeros, or empty strings.

    Raises:
        ConfigurationError: The shape of the input is not fully known.
    """
    shape = [num_rows, *spec.shape[1:]]
    if None in shape:
        raise ConfigurationError(
            "balance='memory' measures layers on inputs of the model's shapes, but "
            f"{spec.name!r} is {tuple(spec.shape)}: give its Input all sizes, or use "
            "balance='parameters'."
        )
    if spec.dtype == "string":
        return tf.fill(shape, "")
    values = keras.random.normal(shape, seed=0) if "float" in spec.dtype else tf.zeros(shape)
    return tf.cast(values, spec.dtype)
