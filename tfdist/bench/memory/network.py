"""The network that the memory benchmark trains, and its rows; TensorFlow comes when it is made."""

from __future__ import annotations

import math
from typing import Any

_ROWS = 8
_MULTIPLE = 64


def width(weights: int, layers: int) -> int:
    """Returns how many units each of so many layers has, for about so many weights together."""
    # Halves of odd sizes lie in chunks of wholes, which the allocator counts and does not cut.
    return _MULTIPLE * max(1, round(math.sqrt(weights / layers) / _MULTIPLE))


def network(width: int, layers: int) -> Any:
    """Returns a compiled `keras.Model` of dense layers of equal size, under Adam."""
    import keras

    keras.utils.set_random_seed(1)
    dense = [keras.layers.Dense(width, "tanh", use_bias=False) for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *dense])
    # With an epsilon of 1e-7 Adam would show rounding of the smallest gradients as large as others.
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-2), "mse")
    return model


def batches(width: int) -> Any:
    """Returns a `tf.data.Dataset` of one batch without end, which the network is to return."""
    import tensorflow as tf

    x = tf.random.stateless_normal([_ROWS, width], seed=(0, 1))
    return tf.data.Dataset.from_tensors((x, tf.tanh(x))).repeat()
