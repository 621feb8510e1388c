"""A small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers

from tfdist.models.builders import head
from tfdist.models.builders.pixels import pixels


def cnn(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    filters: Sequence[int] = (32, 64, 128),
    units: int = 192,
    dropout: float = 0.0,
    batch_norm: bool = False,
    scale: float | None = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds 3x3 convolutions with pooling between them, then one dense layer.

    Global average pooling precedes the dense layer, so that the number of weights, about 120,000 by
    default, does not depend on the image size.

    Example:
        >>> from tfdist import models
        >>> models.cnn((28, 28, 1), 10).output_shape
        (None, 10)

    Args:
        input_shape: Shape of one image: height, width, channels; each side at least
            `2 ** (len(filters) - 1)` pixels.
        num_classes: Number of logits.
        filters: Filters of each convolution.
        units: Units of the dense layer.
        dropout: Dropout rate before and after the dense layer.
        batch_norm: Add BatchNorm after each convolution.
        scale: Factor for the images, applied on the device; for images in uint8.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.
    """
    inputs, x = pixels(input_shape, scale, dtype_policy)
    for i, size in enumerate(filters):
        if i > 0:
            x = layers.MaxPooling2D(dtype=dtype_policy)(x)
        # BatchNorm has its own offset, so the convolution needs no bias.
        x = layers.Conv2D(size, 3, padding="same", use_bias=not batch_norm, dtype=dtype_policy)(x)
        if batch_norm:
            x = layers.BatchNormalization(dtype=dtype_policy)(x)
        x = layers.ReLU(dtype=dtype_policy)(x)
    x = layers.GlobalAveragePooling2D(dtype=dtype_policy)(x)
    if dropout:
        x = layers.Dropout(dropout, dtype=dtype_policy)(x)
    x = layers.Dense(units, activation="relu", dtype=dtype_policy)(x)
    if dropout:
        x = layers.Dropout(dropout, dtype=dtype_policy)(x)
    return keras.Model(inputs, head.logits(x, num_classes, dtype_policy), name="cnn")
