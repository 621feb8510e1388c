"""BatchNorm over replicas: moments of each replica's batch, or of the global batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.replica.replica import current
from tfdist.upstream.keras_model import (
    called_by,
    flatten_layers,
    moments,
    moments_computed_by,
    reduction_axes,
)

#: What TensorFlow's fused kernel accepts.
_FUSED_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


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
            stack.enter_context(called_by(layer, functools.partial(type(layer).call, layer)))
        yield


def local_moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the moments of this replica's batch; replaces the layer's own method.

    Args:
        layer: The layer.
        inputs: Float tensor, channels along `layer.axis`.
        mask: Bool tensor of one rank less, or None.

    Returns:
        Mean and variance, one number per channel.
    """
    return _if_rows(layer, *moments(layer, inputs, mask))


def _if_rows(
    layer: keras.layers.BatchNormalization, mean: tf.Tensor, variance: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns moments, or the moving ones if a replica has no rows: NaN must reach no gradient."""
    replica = current()
    if replica is None or replica.num_microbatches == 1:
        return mean, variance
    old = layer.moving_mean, layer.moving_variance
    return tuple(
        tf.where(replica.num_rows > 0, new, tf.cast(moving, new.dtype))
        for new, moving in zip((mean, variance), old, strict=True)
    )


def is_fusible(layer: keras.layers.BatchNormalization) -> bool:
    """Returns whether `fused` can replace a layer's `call`: Keras's, of images, channels last."""
    plain = keras.layers.BatchNormalization
    renorm = getattr(layer, "renorm", False)  # Keras 3.8 has none
    is_plain = type(layer).call is plain.call and not renorm and 0 < layer.momentum < 1
    return is_plain and len(reduction_axes(layer) or ()) == 3 and layer.axis in (-1, 3)


def fused(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    training: bool | None = None,
    mask: Any = None,
) -> tf.Tensor:
    """Normalizes by the moments of this replica's batch in one kernel; replaces a layer's `call`.

    Keras takes some thirty operations for both passes, and casts half precision to float32 for
    them: on a GPU most of the time of a ResNet. The kernel reads half precision and computes in
    float32. It also updates the moving moments, but with the unbiased variance, where Keras takes
    the biased one.

    Args:
        layer: A layer that `is_fusible`.
        inputs: `(rows, height, width, channels)`.
        training: Without training, or with a mask, Keras's own `call` is used.
        mask: Bool tensor of one rank less, or None.

    Returns:
        The normalized inputs, in the layer's compute dtype.
    """
    x = tf.convert_to_tensor(inputs)
    if not (training and layer.trainable) or mask is not None or x.dtype not in _FUSED_DTYPES:
        return type(layer).call(layer, inputs, training=training, mask=mask)
    channels = x.shape[-1]
    x, bias = _without_bias(x)
    moving = [tf.cast(v, tf.float32) for v in (layer.moving_mean, layer.moving_variance)]
    outputs, mean, unbiased, *_ = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=tf.cast(layer.gamma, tf.float32) if layer.scale else tf.ones([channels]),
        offset=tf.cast(layer.beta, tf.float32) if layer.center else tf.zeros([channels]),
        mean=moving[0],
        variance=moving[1],
        epsilon=layer.epsilon,
        exponential_avg_factor=1.0 - layer.momentum,
        is_training=True,
    )
    # `unbiased` is m * moving + (1 - m) * variance / (1 - share), with one value's share of all.
    share = 1 / tf.cast(tf.size(x) // channels, tf.float32)
    if bias is not None:
        mean += (1 - layer.momentum) * tf.cast(bias, tf.float32)
    variance = unbiased * (1 - share) + moving[1] * (layer.momentum * share)
    for old, new in zip(
        (layer.moving_mean, layer.moving_variance), _if_rows(layer, mean, variance), strict=True
    ):
        old.assign(tf.cast(new, old.dtype))
    return tf.cast(outputs, layer.compute_dtype)


def _without_bias(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns what a bias was added to, and the bias; `x` and None if none was added.

    Normalizing subtracts the bias again, so that its gradient is zero. Adding it and summing its
    gradient reads and writes the outputs of a convolution seven times.
    """
    if tf.executing_eagerly() or x.op.type != "BiasAdd" or x.op.get_attr("data_format") != b"NHWC":
        return x, None
    without, bias = x.op.inputs

    @tf.custom_gradient
    def connected(without: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Any]:
        # Keras's optimizers expect a gradient for each weight: zeros, not None.
        return tf.identity(without), lambda upstream: (upstream, tf.zeros_like(bias))

    return connected(without, bias), bias


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
