"""Synchronised BatchNorm: the moments of the global batch, on shares of any size."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.replica import current


def layers_of(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns the BatchNormalization layers of a model, nested ones too."""
    batch_norm = keras.layers.BatchNormalization
    return [layer for layer in model._flatten_layers() if isinstance(layer, batch_norm)]


def global_moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Takes the place of `layer._moments` while a replica is traced.

    Two sums, as on one device: the variance is taken around the global mean, because E[x^2] -
    E[x]^2 loses what the mean is large against.

    Args:
        layer: Whose axes are used.
        inputs: Float tensor, channels along `layer.axis`.
        mask: Bool tensor of one rank less, or None.

    Returns:
        Mean and variance over all replicas, one number a channel.
    """
    replica = current()
    if replica is None:
        return type(layer)._moments(layer, inputs, mask)
    axes = layer._reduction_axes
    weights = tf.ones_like(inputs[..., :1] if layer.axis in (-1, inputs.shape.rank - 1) else inputs)
    if mask is not None:
        weights *= tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
    # Keras adds epsilon to the weights that a mask leaves; without a mask the count is exact.
    epsilon = keras.backend.epsilon() if mask is not None else 0.0

    def total(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values, axes, keepdims=True)

    sum_x, count = replica.sum_through([total(inputs * weights), total(weights)])
    mean = sum_x / (count + epsilon)
    (sum_squares,) = replica.sum_through([total(tf.square(inputs - mean) * weights)])
    variance = sum_squares / (count + epsilon)
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
