"""Measures exchanges: the bytes that a process sends, and the time that an all-reduce takes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

import tensorflow as tf

#: Exchanges in which each of n processes ends with all of a tensor, or begins with all of it.
Exchange = Literal["all-reduce", "reduce-scatter", "all-gather"]

#: How often a process sends (n - 1) / n of the tensor with a bandwidth-optimal algorithm
#: (Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters").
_TIMES = MappingProxyType({"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1})


class Traffic:
    """Counts bytes that are sent, also by graphs while they run.

    Args:
        num_processes: The number of processes of the exchange.
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


#: Repetitions of a timing.
_REPEATS = 5

_counting: list[Traffic] = []


@contextlib.contextmanager
def counted(num_processes: int) -> Iterator[Traffic]:
    """Counts what functions exchange that are traced and called within the context."""
    _counting.append(Traffic(num_processes))
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


def note(exchange: Exchange, tensors: Sequence[tf.Tensor]) -> None:
    """Counts tensors that are exchanged, each as a whole, if anybody measures traffic."""
    for traffic in _counting:
        for tensor in tensors:
            traffic.add(exchange, tensor)


class Replicas(Protocol):
    """The part of a strategy that a measurement needs."""

    def run(self, fn: Callable[[int], Any]) -> Any:
        """Calls `fn(index)` on every replica of this process."""

    def local_results(self, results: Any) -> list[Any]:
        """Returns what `run` returned as a list."""

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        """Returns tensors reduced over all replicas; called on a replica."""


def measure_all_reduce(
    replicas: Replicas, num_bytes: int, repeats: int = _REPEATS
) -> tuple[float, float]:
    """Times an all-reduce of float32 ones; every rank calls it with the same arguments.

    Args:
        replicas: The replicas of a strategy.
        num_bytes: Size of the tensor on each of them.
        repeats: The number of measurements.

    Returns:
        The median time in seconds, and the sum of the ones.
    """
    ones = tf.ones([num_bytes // 4])

    def on_replica(_: int) -> list:
        # One tensor per replica: TensorFlow assumes that a tensor shared by all is summed already.
        return replicas.all_reduce([tf.identity(ones)])

    @tf.function
    def reduce() -> list:
        return replicas.local_results(
            replicas.run(on_replica)
        )  # all of it, or parts are not computed

    total, times = float(reduce()[0][0][0]), []  # traces, and synchronizes the ranks
    for _ in range(repeats):
        began = time.perf_counter()
        total = float(reduce()[0][0][0])  # waits for the sum
        times.append(time.perf_counter() - began)
    return statistics.median(times), total
