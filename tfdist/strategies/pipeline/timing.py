"""What each call of a model takes: measured on inputs of its shapes, forward and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.pipeline.inputs import rows_like
from tfdist.upstream.keras_graph import operations_called_through
from tfdist.upstream.keras_model import move

#: Rows of the inputs, and measurements of a call, of which the shortest counts.
_ROWS, _ROUNDS = 8, 3


def seconds(
    model: keras.Model, operations: Sequence[keras.Operation], device: str, host: str
) -> list[float]:
    """Returns the seconds of each call, in the order of a forward pass.

    The weights of one call at a time are on the device, so that it need not hold the whole model.

    Args:
        model: Built; it stays as it is.
        operations: Of each call.
        device: To compute on.
        host: Where the weights are, and stay.

    Raises:
        ConfigurationError: Inputs of an unknown shape.
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
                outputs, taken = _measure(call, operation, args, kwargs)
        finally:
            inside[0] = False
            for weight in weights:
                move(weight, host)
        found.append(taken)
        return outputs

    inputs = [rows_like(spec, _ROWS, "time") for spec in model.inputs]
    with keras.StatelessScope(), operations_called_through(measured):
        model(inputs if len(inputs) > 1 else inputs[0], training=True)
    return found


def _measure(call: Callable[..., Any], operation: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Calls an operation, with its way back, and returns what it returned and the seconds."""
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
        # The host goes on before a GPU is done: a number of each has to come back.
        for tensor in [*total, *(g for g in gradients if isinstance(g, tf.Tensor))]:
            tf.reshape(tensor, [-1])[:1].numpy()
        shortest = min(shortest, time.perf_counter() - began)
    return outputs, shortest


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating
