"""U-Net: a class for each pixel.

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
    """Builds two convolutions at each size on the way down and up, with skips between.

    Example:
        >>> from tfdist import models
        >>> models.unet((32, 32, 3), num_classes=4, filters=8, depth=2).output_shape
        (None, 32, 32, 4)

    Args:
        input_shape: Of one image: height, width, channels; the sides divide by `2 ** depth`.
        num_classes: Logits of each pixel.
        filters: At full size; twice as many at each half of it.
        depth: How often the image is halved.
        batch_norm: Normalise behind each convolution, which the paper does not.
        scale: Multiplies the images on their device.
        dtype_policy: Name of the Keras policy of all layers; None: the global one.

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
                use_bias=not batch_norm,  # the offset of a BatchNorm makes it idle
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
