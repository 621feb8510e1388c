"""Positions in the data, and datasets that start at a position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import tensorflow as tf


class Position(NamedTuple):
    """The next batch to read, as two numbers that can be stored in a checkpoint.

    The position is the same on every input pipeline. Together with the seed and the number of
    pipelines it determines everything that is read from there on.

    Example:
        >>> start = pipelines.Position(epoch=0, batch=20)
        >>> dataset = pipelines.read("data/digits", 64, seed=1, start=start)
        >>> len(list(dataset))  # 29 batches per epoch
        9

    Attributes:
        epoch: The epoch, from 0.
        batch: Global batches of this epoch that were read already.
    """

    epoch: int = 0
    batch: int = 0


BEGINNING = Position()


class Record(NamedTuple):
    """A record of a batch, and where it is stored.

    Example:
        >>> restart = pipelines.restart_of(pipelines.read("data/digits", 64))
        >>> restart.records(0, 1)[0].position
        64

    Attributes:
        file: Path or URL of the shard.
        position: Its number in the shard, from 0.
        serialized: The record.
    """

    file: str
    position: int
    serialized: bytes


_peeks: list[object] = []

#: Returns the records of the batch at a position.
Locate = Callable[[Position], list[Record]]
#: Returns what fails, and in which record, in a number of batches from a position on.
Explain = Callable[[Position, int], str | None]


@contextmanager
def peek() -> Iterator[None]:
    """Context manager for reading the first batch without advancing to the next epoch.

    Iterations that start within the block do not count as epochs, so that a look at the data does
    not change the order of the training that follows.

    Example:
        >>> dataset = pipelines.read("data/digits", 64, seed=1)
        >>> with pipelines.peek():
        ...     first = next(iter(dataset))
        >>> first["image"].shape
        TensorShape([64, 64])
    """
    _peeks.append(None)
    try:
        yield
    finally:
        _peeks.pop()


def starts(start: Position | Callable[[], Position], batch_size: int) -> tf.data.Dataset:
    """Returns a dataset that yields the start of each iteration.

    Args:
        start: Start of the first iteration; each further one reads the whole next epoch. A function
            is called at the start of every iteration instead.
        batch_size: Records per batch of this pipeline.

    Returns:
        A dataset of one element per iteration: the epoch, and the number of its records to skip,
        int64 `(2,)`.
    """
    num_read = 0

    def position() -> np.ndarray:
        nonlocal num_read
        iteration = num_read
        num_read += not _peeks
        if callable(start):
            epoch, batch = start()
        else:
            epoch, batch = start.epoch + iteration, start.batch if iteration == 0 else 0
        return np.array([epoch, batch * batch_size], np.int64)

    @tf.autograph.experimental.do_not_convert
    def element(_: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(position, [], tf.int64), (2,))

    return tf.data.Dataset.from_tensors(0).map(element)


#: The attribute of a dataset that has its `Restart`. Datasets derived from it have none.
ATTRIBUTE = "restart"


class Restart:
    """Creates a dataset again with another start.

    Example:
        >>> restart = pipelines.restart_of(pipelines.read("data/digits", 64, seed=1))
        >>> dataset = restart.dataset(lambda: (0, 20))  # first epoch, after 20 batches
        >>> len(list(dataset))
        9

    Args:
        make: Returns the dataset for a function that is called at the start of each iteration.
        first: Start of the original dataset.
        locate: Returns the records of the batch at a position; None if their order is not known.
        explain: Returns which record cannot be an example; None for a mixture.

    Attributes:
        num_iterations: Number of completed iterations, as recorded by the user of the dataset.
    """

    def __init__(
        self,
        make: Callable[[Callable[[], Position]], tf.data.Dataset],
        first: Position,
        locate: Locate | None = None,
        explain: Explain | None = None,
    ) -> None:
        self._make, self._first, self._locate, self._explain = make, first, locate, explain
        self.num_iterations = 0

    def records(self, iteration: int, batch: int) -> list[Record] | None:
        """Returns the records of a batch in their order; None for a mixture or a cache.

        Example:
            >>> restart = pipelines.restart_of(pipelines.read("data/digits", 64, seed=1))
            >>> len(restart.records(0, 20))
            64

        Args:
            iteration: The number of the iteration, from 0.
            batch: The number of the batch in it, from 0.
        """
        if self._locate is None:
            return None
        return self._locate(self._position(iteration, batch))

    def problem(self, iteration: int, batch: int, num_batches: int) -> str | None:
        """Returns which record cannot be an example, and why, such as an image that is cut off.

        TensorFlow's own error names neither the file nor the record.

        Example:
            >>> restart = pipelines.restart_of(pipelines.read("data/digits", 64, seed=1))
            >>> print(restart.problem(0, 20, num_batches=2))
            None

        Args:
            iteration: As for `records`.
            batch: The first batch to look at.
            num_batches: Number of batches to look at.
        """
        if self._explain is None:
            return None
        return self._explain(self._position(iteration, batch), num_batches)

    def dataset(self, where: Callable[[], tuple[int, int]]) -> tf.data.Dataset:
        """Returns the dataset with a function that determines the start of each iteration.

        Args:
            where: Returns the number of the iteration, from 0, and the number of batches to skip.
        """

        def position() -> Position:
            return self._position(*where())

        return self._make(position)

    def _position(self, iteration: int, batch: int) -> Position:
        epoch, before = self._first
        return Position(epoch + iteration, batch + (before if iteration == 0 else 0))


def restart_of(dataset: object) -> Restart | None:
    """Returns the `Restart` of a dataset of `read` or `mix`, or None for any other dataset.

    Example:
        >>> pipelines.restart_of(pipelines.read("data/digits", 64)).num_iterations
        0
        >>> pipelines.restart_of(tf.data.Dataset.range(3)) is None
        True
    """
    restart = getattr(dataset, ATTRIBUTE, None)
    return restart if isinstance(restart, Restart) else None


def with_restart(
    dataset: tf.data.Dataset,
    make: Callable[[Callable[[], Position]], tf.data.Dataset],
    start: Position | Callable[[], Position],
    locate: Locate | None = None,
    explain: Explain | None = None,
) -> tf.data.Dataset:
    """Attaches a `Restart` to a dataset, unless a function determines its start already."""
    if not callable(start):
        setattr(dataset, ATTRIBUTE, Restart(make, start, locate, explain))
    return dataset
