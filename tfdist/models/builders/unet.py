"""U-Net: classifies each pixel of an image.

Source: Ronneberger, Fischer and Brox 2015, "U-Net: Convolutional Networks for Biomedical Image
Segmentation", figure 1; with padded convolutions, so that the mask is as large as the image.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers

from tfdist.models.builders import head
from tfdist.models.builders.pixels import pixels


def unet(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    filters: int = 64,
    depth: int = 4,
    batch_norm: bool = False,
    scale: float | None = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds an encoder and a decoder with two convolutions per level and skip connections.

    Example:
        >>> from tfdist import models
        >>> models.unet((32, 32, 3), num_classes=4, filters=8, depth=2).output_shape
        (None, 32, 32, 4)

    Args:
        input_shape: Shape of one image: height, width, channels; the sides are multiples of
            `2 ** depth`.
        num_classes: Number of logits per pixel.
        filters: Filters at full resolution, doubled each time the image is halved.
        depth: Number of times that the image is halved.
        batch_norm: Add BatchNorm after each convolution, unlike the paper.
        scale: Factor for the images, applied on the device.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits
        `(batch, height, width, num_classes)`.
    """

    def two_convolutions(x: keras.KerasTensor, level: int) -> keras.KerasTensor:
        for _ in range(2):
            x = layers.Conv2D(
                filters * 2**level,
                3,
                padding="same",
                use_bias=not batch_norm,  # BatchNorm has its own offset
                kernel_initializer="he_normal",
                dtype=dtype_policy,
            )(x)
            if batch_norm:
                x = layers.BatchNormalization(dtype=dtype_policy)(x)
            x = layers.ReLU(dtype=dtype_policy)(x)
        return x

    inputs, x = pixels(input_shape, scale, dtype_policy)
    skips = []
    for level in range(depth):
        skips.append(x := two_convolutions(x, level))
        x = layers.MaxPooling2D(dtype=dtype_policy)(x)
    x = two_convolutions(x, depth)
    for level in reversed(range(depth)):
        x = layers.Conv2DTranspose(filters * 2**level, 2, strides=2, dtype=dtype_policy)(x)
        x = two_convolutions(layers.Concatenate(dtype=dtype_policy)([skips[level], x]), level)
    dtype = head.dtype(dtype_policy)
    outputs = layers.Conv2D(num_classes, 1, dtype=dtype, name="logits")(x)
    return keras.Model(inputs, outputs, name="unet")
