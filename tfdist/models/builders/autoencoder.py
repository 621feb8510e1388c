"""A convolutional autoencoder.

Source: https://keras.io/examples/vision/autoencoder, whose sizes are the defaults.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers

from tfdist.models.builders import head
from tfdist.models.builders.pixels import pixels


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
