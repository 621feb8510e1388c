"""A small convolutional network, and AlexNet, in one column or in two.

Source: Krizhevsky, Sutskever and Hinton 2012, "ImageNet Classification with Deep Convolutional
Neural Networks", section 3 and figure 2: the paper trained it on two GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
from keras import layers, ops

from tfdist.errors import ConfigurationError
from tfdist.models.builders import head
from tfdist.models.builders.head import pixels

#: Channels of the five convolutions, and units of the two dense layers, over all columns.
_CHANNELS = (96, 256, 384, 384, 256)
_UNITS = 4096

Columns = list[keras.KerasTensor]


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


def alexnet(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    columns: int = 1,
    width: float = 1.0,
    dropout: float = 0.5,
    scale: float | None = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds five convolutions and three dense layers.

    Example:
        >>> from tfdist import models
        >>> models.alexnet((67, 67, 3), 10, width=0.25).output_shape
        (None, 10)

    Args:
        input_shape: Shape of one image: height, width, channels; each side at least 67 pixels.
            227 pixels give the layer sizes of the paper, which states 224 without its padding.
        num_classes: Number of logits.
        columns: 1, or 2: two parallel columns with half of the channels each, which read the other
            column's output only in the third convolution and in the dense layers.
        width: Factor for the paper's numbers of channels and units.
        dropout: Dropout rate of both hidden dense layers.
        scale: Factor for the images, applied on the device.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.

    Raises:
        ConfigurationError: `columns` is neither 1 nor 2.
    """
    if columns not in (1, 2):
        raise ConfigurationError(f"alexnet: expected 1 or 2 columns, got {columns}.")

    def apply(x: Columns, layer: Callable[[], layers.Layer]) -> Columns:
        return [layer()(column) for column in x]

    def conv(x: Columns, index: int, size: int, strides: int, padding: str) -> Columns:
        filters = int(_CHANNELS[index] * width) // columns
        return apply(x, lambda: layers.Conv2D(
            filters, size, strides, padding, activation="relu", dtype=dtype_policy
        ))  # fmt: skip

    def max_pool(x: Columns) -> Columns:
        return apply(x, lambda: layers.MaxPooling2D(3, 2, dtype=dtype_policy))

    def dense(x: Columns) -> Columns:
        units = int(_UNITS * width) // columns
        x = apply(x, lambda: layers.Dense(units, activation="relu", dtype=dtype_policy))
        return apply(x, lambda: layers.Dropout(dropout, dtype=dtype_policy))

    def concatenate(x: Columns) -> Columns:
        return [layers.Concatenate(dtype=dtype_policy)(x)] * columns if columns > 1 else x

    inputs, image = pixels(input_shape, scale, dtype_policy)
    x = conv([image] * columns, 0, 11, 4, "valid")
    x = max_pool([_local_response_norm(column) for column in x])
    x = conv(x, 1, 5, 1, "same")
    x = max_pool([_local_response_norm(column) for column in x])
    x = conv(concatenate(x), 2, 3, 1, "same")
    x = conv(x, 3, 3, 1, "same")
    x = max_pool(conv(x, 4, 3, 1, "same"))
    x = apply(x, lambda: layers.Flatten(dtype=dtype_policy))
    x = dense(concatenate(dense(concatenate(x))))
    return keras.Model(
        inputs, head.logits(concatenate(x)[0], num_classes, dtype_policy), name="alexnet"
    )


def _local_response_norm(x: keras.KerasTensor) -> keras.KerasTensor:
    """Returns the local response normalization over five channels (section 3.3)."""
    wide = ops.cast(x, keras.backend.result_type(x.dtype, "float32"))  # squares overflow float16
    squares = ops.pad(ops.square(wide), ((0, 0), (0, 0), (0, 0), (2, 2)))
    total = sum(squares[..., i : i + x.shape[-1]] for i in range(5))
    return ops.cast(wide / ops.power(2.0 + 1e-4 * total, 0.75), x.dtype)
