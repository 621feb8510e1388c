"""ResNet-18 for small images.

Source: He et al. 2016, "Deep Residual Learning for Image Recognition"; the stem is that of its
section 4.2 for CIFAR, one 3x3 convolution without pooling, because 32 pixels bear no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers

from tfdist.models import head


def resnet18(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    width: int = 64,
    num_blocks: Sequence[int] = (2, 2, 2, 2),
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds residual stages of two-convolution blocks, each stage half the size, twice the width.

    Args:
        input_shape: Of one image: height, width, channels.
        num_classes: Number of logits.
        width: Filters of the first stage; 64 makes 11 million weights.
        num_blocks: Of each stage.
        dtype_policy: Name of the Keras policy of all layers; None: the global one.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.
    """
    inputs = keras.Input(input_shape)
    x = _normalised_convolution(inputs, width, 3, 1, dtype_policy)
    x = layers.ReLU(dtype=dtype_policy)(x)
    for stage, blocks in enumerate(num_blocks):
        for block in range(blocks):
            strides = 2 if stage > 0 and block == 0 else 1
            x = _residual_block(x, width * 2**stage, strides, dtype_policy)
    x = layers.GlobalAveragePooling2D(dtype=dtype_policy)(x)
    return keras.Model(inputs, head.logits(x, num_classes, dtype_policy), name="resnet18")


def _residual_block(
    x: keras.KerasTensor, filters: int, strides: int, dtype_policy: str | None
) -> keras.KerasTensor:
    """Two convolutions beside a shortcut, which is projected where the shapes differ."""
    shortcut = x
    if strides != 1 or x.shape[-1] != filters:
        shortcut = _normalised_convolution(x, filters, 1, strides, dtype_policy)
    x = _normalised_convolution(x, filters, 3, strides, dtype_policy)
    x = layers.ReLU(dtype=dtype_policy)(x)
    x = _normalised_convolution(x, filters, 3, 1, dtype_policy)
    x = layers.Add(dtype=dtype_policy)([x, shortcut])
    return layers.ReLU(dtype=dtype_policy)(x)


def _normalised_convolution(
    x: keras.KerasTensor, filters: int, kernel_size: int, strides: int, dtype_policy: str | None
) -> keras.KerasTensor:
    """A convolution without bias, which the offset of the BatchNorm behind it replaces."""
    x = layers.Conv2D(
        filters,
        kernel_size,
        strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        dtype=dtype_policy,
    )(x)
    return layers.BatchNormalization(dtype=dtype_policy)(x)
