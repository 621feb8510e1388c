"""How many bytes a process sends to the others, counted where it sends them, for who asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Literal

import tensorflow as tf

#: An exchange in which each of n processes ends with all of a tensor, or begins with all of it.
Exchange = Literal["all-reduce", "reduce-scatter", "all-gather"]

#: How often a process sends (n - 1) / n of the tensor by an algorithm that sends no byte too much
#: (Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters").
_TIMES = MappingProxyType({"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1})


class Traffic:
    """Counts, in graphs too, while they run.

    Args:
        num_processes: That exchange.
    """

    def __init__(self, num_processes: int) -> None:
        self._share = (num_processes - 1) / num_processes
        with tf.device("CPU:0"):
            self._exchanged = {
                exchange: tf.Variable(0, dtype=tf.int64, trainable=False) for exchange in _TIMES
            }

    def num_bytes(self) -> float:
        """Returns the bytes that this process has sent."""
        counts = {exchange: int(count) for exchange, count in self._exchanged.items()}
        return sum(self._share * _TIMES[exchange] * count for exchange, count in counts.items())

    def add(self, exchange: Exchange, tensor: tf.Tensor) -> None:
        """Counts one more exchange."""
        with tf.device("CPU:0"):
            size = tf.size(tensor, tf.int64) * tensor.dtype.size
            self._exchanged[exchange].assign_add(size)


_counting: list[Traffic] = []


@contextlib.contextmanager
def counted(num_processes: int) -> Iterator[Traffic]:
    """Counts what functions exchange that are called, and traced, within it."""
    _counting.append(Traffic(num_processes))
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


def note(exchange: Exchange, tensors: Sequence[tf.Tensor]) -> None:
    """Tells whoever counts of tensors that are exchanged: of each, the whole one."""
    for traffic in _counting:
        for tensor in tensors:
            traffic.add(exchange, tensor)
