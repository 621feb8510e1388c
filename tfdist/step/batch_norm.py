"""BatchNorm over replicas: moments of each replica's batch, or of the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.step.replica import current
from tfdist.upstream.keras_model import flatten_layers, moments, moments_computed_by, reduction_axes


def layers_of(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns the BatchNormalization layers of a model, nested ones too."""
    batch_norm = keras.layers.BatchNormalization
    return [layer for layer in flatten_layers(model) if isinstance(layer, batch_norm)]


@contextmanager
def fixed_moments(model: keras.Model) -> Iterator[None]:
    """Lets BatchNormalization use its moving moments, which do not depend on the rows."""
    with ExitStack() as stack:
        for layer in layers_of(model):

            def moving(inputs: Any, mask: Any, layer: Any = layer) -> tuple[Any, Any]:
                statistics = layer.moving_mean, layer.moving_variance
                return tuple(tf.cast(moment, inputs.dtype) for moment in statistics)

            stack.enter_context(moments_computed_by(layer, moving))
        yield


def local_moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the moments of this replica's batch; replaces the layer's own method.

    A replica without rows has no moments. It gets the moving ones, so that no NaN reaches a
    gradient.

    Args:
        layer: The layer.
        inputs: Float tensor, channels along `layer.axis`.
        mask: Bool tensor of one rank less, or None.

    Returns:
        Mean and variance, one number per channel.
    """
    replica, found = current(), moments(layer, inputs, mask)
    if replica is None or replica.num_microbatches == 1:
        return found
    moving = (layer.moving_mean, layer.moving_variance)
    return tuple(
        tf.where(replica.num_rows > 0, new, tf.cast(old, new.dtype))
        for new, old in zip(found, moving, strict=True)
    )


def global_moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the moments of the global batch; replaces the layer's own method.

    Takes two sums over the replicas, as one device takes two over the rows: the variance is taken
    around the global mean, because E[x^2] - E[x]^2 cancels digits where the mean is large.

    Args:
        layer: The layer.
        inputs: Float tensor, channels along `layer.axis`.
        mask: Bool tensor of one rank less, or None.

    Returns:
        Mean and variance over all replicas, one number per channel.
    """
    replica = current()
    if replica is None:
        return moments(layer, inputs, mask)
    axes = reduction_axes(layer)
    weights = tf.ones_like(inputs[..., :1] if layer.axis in (-1, inputs.shape.rank - 1) else inputs)
    weights = replica.if_counted(weights)
    if mask is not None:
        weights *= tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
    # Keras adds epsilon to the number of entries that a mask leaves; without one it is exact.
    epsilon = keras.backend.epsilon() if mask is not None else 0.0

    def total(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values, axes, keepdims=True)

    sum_x, count = replica.sum_through([total(inputs * weights), total(weights)])
    mean = sum_x / (count + epsilon)
    (sum_squares,) = replica.sum_through([total(tf.square(inputs - mean) * weights)])
    variance = sum_squares / (count + epsilon)
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
