"""GELU and layer normalization with gradients in closed form.

Keras composes these functions of many operations. TensorFlow derives the gradient operation by
operation, and keeps up to five tensors of the size of the input for it. In closed form, the
gradient needs one such tensor and fewer operations, each of which is a kernel on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.ops import nn

from tfdist.upstream.patching import all_replaced, replaced

#: The constants of `tf.nn.gelu`, which rounds them to float32 for every dtype.
_ROOT_OF_HALF, _COEFFICIENT = float(np.float32(math.sqrt(0.5))), float(np.float32(0.044715))
#: What a function with a custom gradient returns: its value, and the function of its gradient.
_Differentiable = tuple[tf.Tensor, Callable[[tf.Tensor], Any]]


@contextmanager
def gradients_in_closed_form() -> Iterator[None]:
    """Replaces functions of Keras by the same functions with another gradient.

    Values and gradients are those of Keras within rounding, also derivatives of higher order.
    These are `keras.src.backend.nn.gelu`, and `_layer_normalization` and `_rms_normalization` of
    `keras.src.ops.nn`, which layers and `keras.ops` call.
    """
    plain_gelu = backend.nn.gelu
    plain_layer_norm: Any = getattr(nn, "_layer_normalization", None)
    plain_rms_norm: Any = getattr(nn, "_rms_normalization", None)

    def gelu(x: Any, approximate: bool = True) -> tf.Tensor:
        x = tf.convert_to_tensor(x)
        if not x.dtype.is_floating:
            return plain_gelu(x, approximate)
        return (_gelu_by_tanh if approximate else _gelu_by_erf)(x)

    def layer_norm(
        x: Any,
        gamma: Any = None,
        beta: Any = None,
        axis: Any = -1,
        epsilon: float | None = None,
        rms_scaling: bool = False,
    ) -> tf.Tensor:
        x = tf.convert_to_tensor(x)
        first = _first_of_last_axes(x, axis)
        if rms_scaling or first is None:
            return plain_layer_norm(x, gamma, beta, axis, epsilon, rms_scaling)
        return _normalized(x, gamma, beta, first, epsilon, is_centered=True)

    def rms_norm(
        x: Any, scale: Any = None, axis: Any = -1, epsilon: float | None = None
    ) -> tf.Tensor:
        x = tf.convert_to_tensor(x)
        first = _first_of_last_axes(x, axis)
        if first is None or (scale is not None and getattr(scale, "shape", ()) != x.shape[first:]):
            return plain_rms_norm(x, scale, axis, epsilon)
        return _normalized(x, scale, None, first, epsilon, is_centered=False)

    norms = {"_layer_normalization": layer_norm, "_rms_normalization": rms_norm}
    # Keras 3.8 to 3.10 normalize in the layers, with the gradient that TensorFlow derives.
    norms = {name: norm for name, norm in norms.items() if hasattr(nn, name)}
    with replaced(backend.nn, "gelu", gelu), all_replaced(nn, norms):
        yield


@tf.autograph.experimental.do_not_convert
@tf.custom_gradient
def _gelu_by_erf(x: tf.Tensor) -> _Differentiable:
    """`x` times the distribution function of a normal number (Hendrycks and Gimpel, 2016)."""
    scaled = x * _ROOT_OF_HALF
    negative = -scaled
    share = 0.5 * tf.math.erfc(negative)
    slope = share + scaled * tf.exp(scaled * negative) * (1 / math.sqrt(math.pi))
    return x * share, lambda upstream: upstream * slope


@tf.autograph.experimental.do_not_convert
@tf.custom_gradient
def _gelu_by_tanh(x: tf.Tensor) -> _Differentiable:
    """The same with an approximation of the distribution function.

    Keras's `0.5 * (1 + tanh(z / 2))` is `sigmoid(z)`. For large `z`, half precision has few digits
    of `1 - sigmoid(z)` left, but all of `sigmoid(-z)`.
    """
    linear = math.sqrt(8 / math.pi)
    cubic = linear * _COEFFICIENT
    square = tf.square(x)
    z = x * (linear + cubic * square)
    share = tf.sigmoid(z)
    outputs = x * share
    slope = share + outputs * tf.sigmoid(-z) * (linear + 3 * cubic * square)
    return outputs, lambda upstream: upstream * slope


def _first_of_last_axes(x: tf.Tensor, axis: int | Sequence[int]) -> int | None:
    """Returns the first of the axes to normalize; None unless they are static, and the last."""
    if x.shape.rank is None or not x.dtype.is_floating:
        return None
    axes = sorted(a % x.shape.rank for a in ([axis] if isinstance(axis, int) else axis))
    is_last = axes == list(range(x.shape.rank))[-len(axes) :]
    return axes[0] if is_last and x.shape[axes[0] :].is_fully_defined() else None


def _normalized(
    x: tf.Tensor, gamma: Any, beta: Any, first: int, epsilon: float | None, is_centered: bool
) -> tf.Tensor:
    """Normalizes the last axes, from `first` on (Ba et al., 2016; Zhang and Sennrich, 2019).

    Args:
        x: Float tensor. As in Keras, half precision is normalized in float32.
        gamma: Scale, of the shape of the normalized axes; None is 1.
        beta: Offset of the same shape; None is 0.
        first: The first axis to normalize.
        epsilon: Added to the variance; None is Keras's default.
        is_centered: Whether the mean is subtracted.
    """
    dtype = backend.result_type(x.dtype.name, "float32")
    epsilon = keras.backend.epsilon() if epsilon is None else epsilon
    rows, axes = list(range(first)), list(range(first, x.shape.rank))

    def mean(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(values, axes, keepdims=True)

    @tf.autograph.experimental.do_not_convert
    @tf.custom_gradient
    def scaled(inputs: tf.Tensor, *weights: tf.Tensor) -> _Differentiable:
        values = tf.cast(inputs, dtype)
        if is_centered:
            values -= mean(values)
        inverse = tf.math.rsqrt(mean(tf.square(values)) + epsilon)
        normal = values * inverse
        outputs = normal if gamma is None else normal * weights[0]
        if beta is not None:
            outputs += weights[-1]

        def gradients(upstream: tf.Tensor) -> Any:
            upstream = tf.cast(upstream, dtype)
            slopes = upstream if gamma is None else upstream * weights[0]
            change = slopes - normal * mean(slopes * normal)
            if is_centered:
                change -= mean(slopes)
            of_weights = []
            if gamma is not None:
                of_weights.append(tf.reduce_sum(upstream * normal, rows))
            if beta is not None:
                of_weights.append(tf.reduce_sum(upstream, rows))
            return tf.cast(change * inverse, inputs.dtype), *of_weights

        return tf.cast(outputs, inputs.dtype), gradients

    weights = [backend.convert_to_tensor(w, dtype) for w in (gamma, beta) if w is not None]
    # Keras returns a `tf.Variable` as it is. A custom gradient takes none in eager mode.
    return scaled(x, *map(tf.convert_to_tensor, weights))
