"""How whoever goes through a data set epoch after epoch says with which one to begin."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from pipelines.reading.position import Position

#: The attribute of a data set that has its `Restart`; what is made of that data set has none.
ATTRIBUTE = "restart"


class Restart:
    """Makes a data set again that begins wherever one says.

    Args:
        make: Returns the data set for a function that is asked at each beginning.
        first: Where the original begins.

    Attributes:
        num_iterations: How often it was gone through, as whoever does so has noted here.
    """

    def __init__(
        self, make: Callable[[Callable[[], Position]], tf.data.Dataset], first: Position
    ) -> None:
        self._make, self._first = make, first
        self.num_iterations = 0

    def dataset(self, where: Callable[[], tuple[int, int]]) -> tf.data.Dataset:
        """Returns the data set, which asks before each iteration with what to begin.

        Args:
            where: Returns the number of the iteration, from 0, and the batches of it to leave out.
        """

        def position() -> Position:
            iteration, batch = where()
            epoch, before = self._first
            return Position(epoch + iteration, batch + (before if iteration == 0 else 0))

        return self._make(position)


def restart_of(dataset: object) -> Restart | None:
    """Returns how a data set of `read` or `mix` can begin anywhere; None of any other."""
    found = getattr(dataset, ATTRIBUTE, None)
    return found if isinstance(found, Restart) else None


def with_restart(
    dataset: tf.data.Dataset,
    make: Callable[[Callable[[], Position]], tf.data.Dataset],
    start: Position | Callable[[], Position],
) -> tf.data.Dataset:
    """Notes on a data set how to make it begin anywhere, unless a function says that already."""
    if not callable(start):
        setattr(dataset, ATTRIBUTE, Restart(make, start))
    return dataset
