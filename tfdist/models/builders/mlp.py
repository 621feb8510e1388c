"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers

from tfdist.models.builders import head
from tfdist.models.builders.head import pixels


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    units: Sequence[int] = (32, 32),
    dropout: float = 0.0,
    scale: float | None = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds dense layers with ReLU on the flattened input.

    Example:
        >>> from tfdist import models
        >>> models.mlp((28, 28, 1), 10).output_shape
        (None, 10)

    Args:
        input_shape: Shape of one example.
        num_classes: Number of logits.
        units: Units of each hidden layer.
        dropout: Dropout rate of each hidden layer.
        scale: Factor for the examples, applied on the device.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.
    """
    inputs, x = pixels(input_shape, scale, dtype_policy)
    x = layers.Flatten(dtype=dtype_policy)(x)
    for size in units:
        x = layers.Dense(size, activation="relu", dtype=dtype_policy)(x)
        if dropout:
            x = layers.Dropout(dropout, dtype=dtype_policy)(x)
    return keras.Model(inputs, head.logits(x, num_classes, dtype_policy), name="mlp")
