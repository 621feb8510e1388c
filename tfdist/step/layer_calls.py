"""What the layers of a model were called with, and what they returned: to find where two differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.upstream import keras_model
from tfdist.upstream.patching import replaced


class LayerCall(NamedTuple):
    """One call of a layer, or of the model itself."""

    layer: keras.layers.Layer
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


def layer_calls(model: keras.Model, x: Any, training: bool, shift: int = 0) -> list[LayerCall]:
    """Calls a model and returns the calls of all layers, as they came back: the model's is last.

    Args:
        model: Built; it stays as it is.
        x: Inputs.
        training: As in `Model.call`.
        shift: Added to the seeds of random layers.
    """
    calls: list[LayerCall] = []

    def recorded(layer: keras.layers.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def record(*args: Any, **options: Any) -> Any:
            outputs = call(*args, **options)
            calls.append(LayerCall(layer, _arrays((args, options)), _arrays(outputs)))
            return outputs

        return record

    seeds = [(v, v + tf.cast(shift, v.dtype)) for v in keras_model.seeds_of(model)]
    with ExitStack() as stack:
        stack.enter_context(keras.StatelessScope(seeds))
        for layer in keras_model.flatten_layers(model):
            stack.enter_context(replaced(layer, "call", recorded(layer, layer.call)))
        model(x, training=training) if keras_model.takes_training(model) else model(x)
    return calls


def first_difference(
    some: Sequence[LayerCall], others: Sequence[LayerCall], rows: int
) -> keras.layers.Layer | None:
    """Returns the layer that makes something else of the same first rows, if the model does."""
    if not differ(some[-1].outputs, others[-1].outputs, rows):
        return None
    for a, b in zip(some, others, strict=False):
        if differ(a.outputs, b.outputs, rows) and not differ(a.inputs, b.inputs, rows):
            return a.layer
    return some[-1].layer


def differ(some: list[np.ndarray], others: list[np.ndarray], rows: int) -> bool:
    """Tells whether arrays differ in their first rows by more than rounding."""
    pairs = zip(some, others, strict=True)
    return len(some) != len(others) or not all(_equal(a[:rows], b[:rows]) for a, b in pairs)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype.kind not in "fc":
        return np.array_equal(a, b)
    tolerance = 0.05 if a.dtype.itemsize == 2 else 1e-4
    return np.allclose(a, b, rtol=tolerance, atol=tolerance * _size(b), equal_nan=True)


def _size(array: np.ndarray) -> float:
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).mean()) if finite.size else 0.0


def _arrays(structure: Any) -> list[np.ndarray]:
    return [_array(leaf) for leaf in keras.tree.flatten(structure) if tf.is_tensor(leaf)]


def _array(tensor: Any) -> np.ndarray:
    if isinstance(tensor, tf.RaggedTensor):
        tensor = tensor.to_tensor()
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    half = tensor.dtype == tf.bfloat16  # NumPy calls it no float
    return np.atleast_1d(np.asarray(tf.cast(tensor, tf.float16) if half else tensor))
