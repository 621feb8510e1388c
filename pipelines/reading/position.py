"""Where in the data a run is, and how a dataset comes to begin there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import tensorflow as tf


class Position(NamedTuple):
    """What is to be read next: two numbers, which any checkpoint can keep.

    The same on every pipeline. With the seed and the number of pipelines it says all: the order
    of an epoch follows from these alone.

    Attributes:
        epoch: from 0.
        batch: global batches of this epoch that were taken already.
    """

    epoch: int = 0
    batch: int = 0


BEGINNING = Position()

_looks: list[object] = []


@contextmanager
def looking() -> Iterator[None]:
    """Lets whoever looks at the first batch of a dataset leave its next iteration the same epoch.

    Iterations that begin in this block read the next epoch and do not count as having read it, so
    that the order of a training is not another one where somebody had to look at its data first.
    """
    _looks.append(None)
    try:
        yield
    finally:
        _looks.pop()


def starts(start: Position | Callable[[], Position], batch_size: int) -> tf.data.Dataset:
    """Where each iteration begins to read.

    Args:
        start: of the first iteration; each further one reads the next epoch whole. A function is
            asked at the beginning of each iteration instead.
        batch_size: records in a batch of this pipeline.

    Returns:
        A dataset of one element an iteration: the epoch to read, and how many records to leave out
        from its beginning, int64 `(2,)`.
    """
    num_read = 0

    def position() -> np.ndarray:
        nonlocal num_read
        iteration = num_read
        num_read += not _looks
        if callable(start):
            epoch, batch = start()
        else:
            epoch, batch = start.epoch + iteration, start.batch if iteration == 0 else 0
        return np.array([epoch, batch * batch_size], np.int64)

    def element(_: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(position, [], tf.int64), (2,))

    return tf.data.Dataset.from_tensors(0).map(element)
