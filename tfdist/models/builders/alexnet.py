"""AlexNet, in one column, or in two as on the two GPUs that it was made for.

Source: Krizhevsky, Sutskever and Hinton 2012, "ImageNet Classification with Deep Convolutional
Neural Networks", section 3 and figure 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
from keras import layers, ops

from tfdist.errors import ConfigurationError
from tfdist.models.builders import head
from tfdist.models.builders.pixels import pixels

#: Channels of the five convolutions, and units of the two dense layers, in all columns together.
_CHANNELS = (96, 256, 384, 384, 256)
_UNITS = 4096

Columns = list[keras.KerasTensor]


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
        input_shape: Of one image: height, width, channels; each side at least 67 pixels. 227 give
            the paper's sizes (which says 224, with a padding that it does not mention).
        num_classes: Number of logits.
        columns: 1, or 2: layers beside each other, each with half of the channels, which see the
            other column's output in the third convolution and in the dense layers alone.
        width: Share of the paper's channels and units.
        dropout: Share of the values of both hidden dense layers that training drops.
        scale: Multiplies the images on their device.
        dtype_policy: Name of the Keras policy of all layers; None: the global one.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.

    Raises:
        ConfigurationError: Another number of columns.
    """
    if columns not in (1, 2):
        raise ConfigurationError(f"alexnet: expected 1 or 2 columns, got {columns}.")

    def each(x: Columns, layer: Callable[[], layers.Layer]) -> Columns:
        return [layer()(column) for column in x]

    def convolved(x: Columns, which: int, size: int, strides: int, padding: str) -> Columns:
        filters = int(_CHANNELS[which] * width) // columns
        return each(x, lambda: layers.Conv2D(
            filters, size, strides, padding, activation="relu", dtype=dtype_policy
        ))  # fmt: skip

    def pooled(x: Columns) -> Columns:
        return each(x, lambda: layers.MaxPooling2D(3, 2, dtype=dtype_policy))

    def dense(x: Columns) -> Columns:
        units = int(_UNITS * width) // columns
        x = each(x, lambda: layers.Dense(units, activation="relu", dtype=dtype_policy))
        return each(x, lambda: layers.Dropout(dropout, dtype=dtype_policy))

    def met(x: Columns) -> Columns:
        return [layers.Concatenate(dtype=dtype_policy)(x)] * columns if columns > 1 else x

    inputs, image = pixels(input_shape, scale, dtype_policy)
    x = convolved([image] * columns, 0, 11, 4, "valid")
    x = pooled([_normalised(column) for column in x])
    x = convolved(x, 1, 5, 1, "same")
    x = pooled([_normalised(column) for column in x])
    x = convolved(met(x), 2, 3, 1, "same")
    x = convolved(x, 3, 3, 1, "same")
    x = pooled(convolved(x, 4, 3, 1, "same"))
    x = each(x, lambda: layers.Flatten(dtype=dtype_policy))
    x = dense(met(dense(met(x))))
    return keras.Model(inputs, head.logits(met(x)[0], num_classes, dtype_policy), name="alexnet")


def _normalised(x: keras.KerasTensor) -> keras.KerasTensor:
    """Local response normalisation over five channels, with the constants of section 3.3."""
    wide = ops.cast(x, keras.backend.result_type(x.dtype, "float32"))  # float16 bears no squares
    squares = ops.pad(ops.square(wide), ((0, 0), (0, 0), (0, 0), (2, 2)))
    total = sum(squares[..., i : i + x.shape[-1]] for i in range(5))
    return ops.cast(wide / ops.power(2.0 + 1e-4 * total, 0.75), x.dtype)
