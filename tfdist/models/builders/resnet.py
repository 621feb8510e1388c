"""ResNet-18, and other networks of two-convolution blocks.

Source: He et al. 2016, "Deep Residual Learning for Image Recognition". The stem is that of section
4.2 for CIFAR, one 3x3 convolution without pooling, which suits images of 32 pixels, or that of
table 1 for ImageNet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import keras
from keras import layers

from tfdist.models.builders import head
from tfdist.models.builders.head import pixels


def resnet18(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 64,
    num_blocks: Sequence[int] = (2, 2, 2, 2),
    stem: Literal["small", "large"] = "small",
    zero_gamma: bool = False,
    batch_norm_momentum: float = 0.99,
    scale: float | None = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds residual stages; each has half the resolution and twice the width of the one before.

    Example:
        >>> from tfdist import models
        >>> models.resnet18((32, 32, 3), 10, width=16).output_shape
        (None, 10)

    Args:
        input_shape: Shape of one image: height, width, channels.
        num_classes: Number of logits.
        width: Filters of the first stage; 64 makes 11 million weights.
        num_blocks: Blocks of each stage; three stages of n blocks with width 16 are the paper's
            ResNet-(6n+2).
        stem: A 3x3 convolution for small images; or, for those of ImageNet, a 7x7 convolution and
            pooling, which reduce each side to a quarter.
        zero_gamma: Initialize the scale of each block's last BatchNorm with zero, so that each
            block starts as the identity (Goyal et al. 2017, "Accurate, Large Minibatch SGD",
            section 5.1).
        batch_norm_momentum: Momentum of BatchNorm's moving averages. After n steps, the initial
            values still have the weight `momentum ** n`: choose a smaller value for short runs.
        scale: Factor for the images, applied on the device.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.
    """
    momentum = batch_norm_momentum
    inputs, x = pixels(input_shape, scale, dtype_policy)
    kernel_size, strides = (3, 1) if stem == "small" else (7, 2)
    x = _normalized_convolution(x, width, kernel_size, strides, dtype_policy, momentum)
    x = layers.ReLU(dtype=dtype_policy)(x)
    if stem == "large":
        x = layers.MaxPooling2D(3, 2, padding="same", dtype=dtype_policy)(x)
    for stage, blocks in enumerate(num_blocks):
        for block in range(blocks):
            strides = 2 if stage > 0 and block == 0 else 1
            x = _residual_block(x, width * 2**stage, strides, zero_gamma, dtype_policy, momentum)
    x = layers.GlobalAveragePooling2D(dtype=dtype_policy)(x)
    return keras.Model(inputs, head.logits(x, num_classes, dtype_policy), name="resnet18")


def _residual_block(
    x: keras.KerasTensor,
    filters: int,
    strides: int,
    zero_gamma: bool,
    dtype_policy: str | None,
    momentum: float,
) -> keras.KerasTensor:
    """Returns two convolutions plus a shortcut, which is projected if the shapes differ."""
    shortcut = x
    if strides != 1 or x.shape[-1] != filters:
        shortcut = _normalized_convolution(x, filters, 1, strides, dtype_policy, momentum)
    x = _normalized_convolution(x, filters, 3, strides, dtype_policy, momentum)
    x = layers.ReLU(dtype=dtype_policy)(x)
    gamma = "zeros" if zero_gamma else "ones"
    x = _normalized_convolution(x, filters, 3, 1, dtype_policy, momentum, gamma)
    x = layers.Add(dtype=dtype_policy)([x, shortcut])
    return layers.ReLU(dtype=dtype_policy)(x)


def _normalized_convolution(
    x: keras.KerasTensor,
    filters: int,
    kernel_size: int,
    strides: int,
    dtype_policy: str | None,
    momentum: float,
    gamma: str = "ones",
) -> keras.KerasTensor:
    """Returns a convolution followed by BatchNorm, whose offset replaces the bias."""
    x = layers.Conv2D(
        filters,
        kernel_size,
        strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        dtype=dtype_policy,
    )(x)
    return layers.BatchNormalization(
        momentum=momentum, gamma_initializer=gamma, dtype=dtype_policy
    )(x)
