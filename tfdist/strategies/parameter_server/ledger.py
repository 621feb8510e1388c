"""The counts of asynchronous training, which stay exact however many workers add to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

#: Staleness is counted one by one up to here, minus one; then as this.
MOST_STALENESS = 64

#: Of tickets and updates, as `ResourceCountUpTo` wants one.
_NO_LIMIT = 2**62


class Ledger:
    """Counts of what the workers do, in variables of the chief that they change atomically.

    Staleness is how many updates others made between a worker's reading of the weights and its
    own update (Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server").

    Attributes:
        ticket: The number of the step that is being traced, int32; 0 outside of one.
    """

    def __init__(self) -> None:
        self.ticket: Any = 0
        with tf.device("/job:chief/task:0/device:CPU:0"):
            self._tickets = tf.Variable(-1, trainable=False, dtype=tf.int64)
            self._updates = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._rows = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._staleness = tf.Variable(tf.zeros([MOST_STALENESS + 1], tf.int64), trainable=False)

    def last_ticket(self) -> int:
        """Returns the number that was given out last; -1 before the first."""
        return int(self._tickets)

    def take_ticket(self) -> tf.Tensor:
        """Returns the next number, which nobody else ever gets; int64."""
        return _count(self._tickets) + 1

    @contextmanager
    def holding(self, ticket: tf.Tensor) -> Iterator[None]:
        """Traces a step, of which `ticket` is the number meanwhile."""
        self.ticket = tf.cast(ticket, tf.int32)
        try:
            yield
        finally:
            self.ticket = 0

    def num_updates(self) -> tf.Tensor:
        """Returns the updates made so far, int64."""
        return self._updates.read_value()

    def note(self, rows: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Notes an update; returns a tensor that is ready thereafter.

        Args:
            rows: Of its batch.
            seen: Updates made when its weights were read.
        """
        staleness = tf.clip_by_value(_count(self._updates) - seen, 0, MOST_STALENESS)
        one = tf.IndexedSlices(tf.constant([1], tf.int64), staleness[tf.newaxis])
        with tf.control_dependencies([self._rows.assign_add(tf.cast(rows, tf.int64))]):
            return self._staleness.scatter_add(one)[0]

    def staleness(self) -> np.ndarray:
        """Returns how many updates were made with 0, 1, 2, ... others in between; int64."""
        return self._staleness.numpy()

    def totals(self) -> tuple[int, int]:
        """Returns the steps made so far, and their rows."""
        return int(self.staleness().sum()), int(self._rows)

    def summary(self) -> dict[str, str]:
        """Returns rows for the table at the end of a training."""
        counts = self.staleness()
        if not counts.any():
            return {}
        mean = float(np.average(np.arange(len(counts)), weights=counts))
        most = int(np.flatnonzero(counts)[-1])
        more = " or more" if most == MOST_STALENESS else ""
        return {"staleness": f"{mean:.2f} updates on average, at most {most}{more}"}


def _count(variable: tf.Variable) -> tf.Tensor:
    """Adds one and returns what it was: atomic, as `assign_add` and a read after it are not."""
    return tf.raw_ops.ResourceCountUpTo(resource=variable.handle, limit=_NO_LIMIT, T=tf.int64)
