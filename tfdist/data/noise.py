"""Noise in place of data: what a training costs where reading costs nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

#: Global batches that are kept in memory and come again and again.
_NUM_BATCHES = 4


class Noise(NamedTuple):
    """A tensor of noise.

    Attributes:
        shape: Of one example's.
        dtype: Integers are drawn from 0 up to below `high`, floats from a normal distribution.
        high: What integers stay below.
    """

    shape: tuple[int, ...]
    dtype: str
    high: int = 2

    def drawn(self, seed: int, num_rows: int) -> np.ndarray:
        """Returns `(num_rows, *shape)`, the same for the same seed."""
        return self.draw(np.random.default_rng(seed), num_rows)

    def draw(self, random: np.random.Generator, num_rows: int) -> np.ndarray:
        """Returns `(num_rows, *shape)`."""
        shape = (num_rows, *self.shape)
        if np.issubdtype(self.dtype, np.integer):
            return random.integers(0, self.high, shape, self.dtype)
        return random.standard_normal(shape, np.float32).astype(self.dtype)


def batches(element: Any, batch_size: int, num_examples: int, seed: int) -> tf.data.Dataset:
    """Returns full global batches, a few in turn; the same for the same seed.

    Args:
        element: Of one example: `Noise`, or a tuple or a dictionary of them.
        batch_size: Rows of each.
        num_examples: Of an epoch, whose last batch is left out where it is not full.
        seed: Of the noise.
    """
    random, num_rows = np.random.default_rng(seed), _NUM_BATCHES * batch_size
    rows = _drawn(element, random, num_rows)
    few = tf.data.Dataset.from_tensor_slices(rows).batch(batch_size, drop_remainder=True).cache()
    return few.repeat().take(max(num_examples // batch_size, 1)).prefetch(tf.data.AUTOTUNE)


def _drawn(element: Any, random: np.random.Generator, num_rows: int) -> Any:
    if isinstance(element, Noise):
        return element.draw(random, num_rows)
    if isinstance(element, dict):
        return {name: _drawn(part, random, num_rows) for name, part in element.items()}
    return tuple(_drawn(part, random, num_rows) for part in element)
