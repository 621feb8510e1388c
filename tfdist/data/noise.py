"""Noise in place of data, to measure training without the cost of reading."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

#: Number of global batches that are kept in memory and repeated, if they are not larger than this.
_NUM_BATCHES, _MAX_BYTES = 4, 2**28


class Noise(NamedTuple):
    """A tensor of noise.

    Attributes:
        shape: Shape in one example.
        dtype: Integers are uniform from 0 to `high - 1`, floats are normally distributed.
        high: Upper bound of integers, exclusive.
    """

    shape: tuple[int, ...]
    dtype: str
    high: int = 2

    def drawn(self, seed: int, num_rows: int) -> np.ndarray:
        """Returns noise of shape `(num_rows, *shape)` that depends on the seed only."""
        return self.draw(np.random.default_rng(seed), num_rows)

    def draw(self, random: np.random.Generator, num_rows: int) -> np.ndarray:
        """Returns noise of shape `(num_rows, *shape)`."""
        shape = (num_rows, *self.shape)
        if np.issubdtype(self.dtype, np.integer):
            return random.integers(0, self.high, shape, self.dtype)
        return random.standard_normal(shape, np.float32).astype(self.dtype)


def batches(element: Any, batch_size: int, num_examples: int, seed: int) -> tf.data.Dataset:
    """Returns an epoch of full global batches, which repeats a few batches of noise.

    Args:
        element: Structure of one example: `Noise`, or a tuple or dictionary of them.
        batch_size: Global batch size.
        num_examples: Examples per epoch. A partial last batch is dropped.
        seed: Seed of the noise.
    """
    random = np.random.default_rng(seed)
    num_batches = max(1, min(_NUM_BATCHES, _MAX_BYTES // (batch_size * _row_bytes(element))))
    # `from_tensors` passes on the batch that it holds; slices and a cache would be further copies.
    few = [
        tf.data.Dataset.from_tensors(_drawn(element, random, batch_size))
        for _ in range(num_batches)
    ]
    repeated = functools.reduce(lambda a, b: a.concatenate(b), few).repeat()
    return repeated.take(max(num_examples // batch_size, 1)).prefetch(tf.data.AUTOTUNE)


def _row_bytes(element: Any) -> int:
    """Returns the number of bytes of one example."""
    if isinstance(element, Noise):
        return math.prod(element.shape) * np.dtype(element.dtype).itemsize
    parts = element.values() if isinstance(element, dict) else element
    return sum(map(_row_bytes, parts))


def _drawn(element: Any, random: np.random.Generator, num_rows: int) -> Any:
    if isinstance(element, Noise):
        return element.draw(random, num_rows)
    if isinstance(element, dict):
        return {name: _drawn(part, random, num_rows) for name, part in element.items()}
    return tuple(_drawn(part, random, num_rows) for part in element)
