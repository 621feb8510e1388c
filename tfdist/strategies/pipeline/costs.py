"""Costs of the calls of a model, which decide how it is split into stages: time and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.strategies.sharded.plan import num_bytes, state_of
from tfdist.upstream.keras_layers import operations_called_through
from tfdist.upstream.keras_model import move
from tfdist.upstream.keras_optimizers import unwrapped

#: Rows of the inputs on which calls are timed, and repetitions, of which the shortest counts.
_ROWS, _ROUNDS = 8, 3
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


def seconds_by_call(
    model: keras.Model, operations: Sequence[keras.Operation], device: str, host: str
) -> list[float]:
    """Measures the seconds of each call, forward and backward, in the order of a forward pass.

    The weights of one call at a time are on the device, so that it need not hold the whole model.

    Args:
        model: A built model, which is left unchanged.
        operations: The operation of each call.
        device: The device to measure on.
        host: The device that holds the weights before and after.

    Raises:
        ConfigurationError: The shape of an input is not fully known.
    """
    known = {id(operation) for operation in operations}
    inside, found = [False], list[float]()

    def measured(call: Callable[..., Any], operation: Any, *args: Any, **kwargs: Any) -> Any:
        if inside[0] or id(operation) not in known:
            return call(operation, *args, **kwargs)
        inside[0] = True
        weights = [v for v in getattr(operation, "variables", []) if v.dtype != "string"]
        try:
            for weight in weights:
                move(weight, device)
            with tf.device(device):
                outputs, seconds = _measure(call, operation, args, kwargs)
        finally:
            inside[0] = False
            for weight in weights:
                move(weight, host)
        found.append(seconds)
        return outputs

    inputs = [_random_rows(spec, _ROWS, "time") for spec in model.inputs]
    with keras.StatelessScope(), operations_called_through(measured):
        model(inputs if len(inputs) > 1 else inputs[0], training=True)
    return found


def _measure(call: Callable[..., Any], operation: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Calls an operation with its backward pass; returns its output and the seconds."""
    shortest = float("inf")
    for _ in range(1 + _ROUNDS):  # the first one compiles kernels
        began = time.perf_counter()
        entering = [t for t in keras.tree.flatten((args, kwargs)) if _has_gradient(t)]
        with tf.GradientTape() as tape:
            tape.watch(entering)
            outputs = call(operation, *args, **kwargs)
            total = [tf.reduce_sum(t) for t in keras.tree.flatten(outputs) if _has_gradient(t)]
        sources = [*entering, *(v.value for v in getattr(operation, "trainable_variables", []))]
        gradients = tape.gradient(total, sources) if total and sources else []
        # The host runs ahead of a GPU: wait until an element of each result has arrived.
        for tensor in [*total, *(g for g in gradients if isinstance(g, tf.Tensor))]:
            tf.reshape(tensor, [-1])[:1].numpy()
        shortest = min(shortest, time.perf_counter() - began)
    return outputs, shortest


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
    known = {id(operation) for operation in operations}
    optimizer = getattr(model, "optimizer", None)
    plain = unwrapped(optimizer)
    state = (state_of(plain) or 0.0) if plain is not None else 0.0
    inside, counted, found = [False], set[int](), list[HeldBytes]()

    def noted(call: Callable[..., Any], operation: Any, *args: Any, **kwargs: Any) -> Any:
        if inside[0] or id(operation) not in known:
            return call(operation, *args, **kwargs)
        inside[0] = True
        try:
            outputs, activations = _trace_activations(call, operation, args, kwargs)
        finally:
            inside[0] = False
        own = [v for v in getattr(operation, "variables", []) if v.dtype != "string"]
        weights = sum(
            num_bytes(v) * (3.0 + state if v.trainable else 1.0)
            for v in own
            if id(v) not in counted
        )
        counted.update(map(id, own))
        found.append(HeldBytes(weights, activations))
        return outputs

    def forward() -> None:
        inputs = [_random_rows(spec, num_rows, "memory") for spec in model.inputs]
        with keras.StatelessScope(), operations_called_through(noted):
            model(inputs if len(inputs) > 1 else inputs[0], training=True)

    tf.function(forward, autograph=False).get_concrete_function()
    return found


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


def _random_rows(spec: keras.KerasTensor, num_rows: int, balance: str) -> tf.Tensor:
    """Returns rows for a model's input: random floats, integer zeros, or empty strings.

    Raises:
        ConfigurationError: The shape of the input is not fully known.
    """
    shape = [num_rows, *spec.shape[1:]]
    if None in shape:
        raise ConfigurationError(
            f"balance={balance!r} measures layers on inputs of the model's shapes, but "
            f"{spec.name!r} is {tuple(spec.shape)}: give its Input all sizes, or use "
            "balance='parameters'."
        )
    if spec.dtype == "string":
        return tf.fill(shape, "")
    values = keras.random.normal(shape, seed=0) if "float" in spec.dtype else tf.zeros(shape)
    return tf.cast(values, spec.dtype)
