"""Networks from images to images.

U-Net classifies each pixel (Ronneberger, Fischer and Brox 2015, "U-Net: Convolutional Networks for
Biomedical Image Segmentation", figure 1); convolutions are padded here, so that the mask is as
large as the image. The autoencoder is that of https://keras.io/examples/vision/autoencoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers

from tfdist.models.builders import head
from tfdist.models.builders.head import pixels


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


def autoencoder(
    input_shape: Sequence[int],
    *,
    filters: Sequence[int] = (32, 32),
    scale: float | None = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds strided convolutions, mirrored by transposed convolutions.

    Example:
        >>> from tfdist import models
        >>> models.autoencoder((28, 28, 1)).output_shape
        (None, 28, 28, 1)

    Args:
        input_shape: Shape of one image: height, width, channels; the sides are
            multiples of `2 ** len(filters)`.
        filters: Filters of the encoder's convolutions; the decoder has them in reverse order.
        scale: Factor for the images, applied on the device.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to pixels between 0 and 1 of the same
        shape, in float32 under a mixed-precision policy.
    """
    inputs, x = pixels(input_shape, scale, dtype_policy)
    for size in filters:
        x = layers.Conv2D(size, 3, padding="same", activation="relu", dtype=dtype_policy)(x)
        x = layers.MaxPooling2D(dtype=dtype_policy)(x)
    for size in reversed(filters):
        x = layers.Conv2DTranspose(
            size, 3, strides=2, padding="same", activation="relu", dtype=dtype_policy
        )(x)
    x = layers.Conv2D(input_shape[-1], 3, padding="same", dtype=dtype_policy)(x)
    # In 16 bits, a sigmoid rounds nearly white pixels to 1, where the cross entropy is infinite.
    outputs = layers.Activation("sigmoid", dtype=head.dtype(dtype_policy), name="pixels")(x)
    return keras.Model(inputs, outputs, name="autoencoder")
