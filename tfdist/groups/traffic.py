"""Measures communication: bytes that a process sends, and the time of an all-reduce."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

import tensorflow as tf

#: Collectives in which each process starts or ends with a whole tensor.
Exchange = Literal["all-reduce", "reduce-scatter", "all-gather"]

#: How often a process sends (n - 1) / n of the tensor, with n processes and a bandwidth-optimal
#: algorithm (Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms for Clusters").
_TIMES = MappingProxyType({"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1})


class Traffic:
    """Counts sent bytes, including those sent by graphs while they run."""

    def __init__(self, num_processes: int) -> None:
        self._fraction = (num_processes - 1) / num_processes
        with tf.device("CPU:0"):
            self._exchanged = {
                exchange: tf.Variable(0, dtype=tf.int64, trainable=False) for exchange in _TIMES
            }

    def num_bytes(self) -> float:
        """Returns the bytes that this process has sent."""
        counts = {exchange: int(count) for exchange, count in self._exchanged.items()}
        return sum(self._fraction * _TIMES[exchange] * count for exchange, count in counts.items())

    def add(self, exchange: Exchange, tensor: tf.Tensor) -> None:
        """Counts a collective."""
        with tf.device("CPU:0"):
            size = tf.size(tensor, tf.int64) * tensor.dtype.size
            self._exchanged[exchange].assign_add(size)


#: Repetitions of a timing.
_REPEATS = 5

_counting: list[Traffic] = []


@contextlib.contextmanager
def counted(num_processes: int) -> Iterator[Traffic]:
    """Counts the communication of functions that are traced and called within the context."""
    _counting.append(Traffic(num_processes))
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


def note(exchange: Exchange, tensors: Sequence[tf.Tensor]) -> None:
    """Counts communicated tensors within a `counted` context."""
    for traffic in _counting:
        for tensor in tensors:
            traffic.add(exchange, tensor)


class Replicas(Protocol):
    """The part of a strategy that a measurement needs."""

    def run(self, fn: Callable[[int], Any]) -> Any:
        """Calls `fn(index)` on every replica of this process."""

    def local_results(self, results: Any) -> list[Any]:
        """Returns what `run` returned as a list."""

    def all_reduce(self, tensors: list) -> list:
        """Returns tensors summed over all replicas; called on a replica."""


def measure_all_reduce(
    replicas: Replicas, num_bytes: int, repeats: int = _REPEATS
) -> tuple[float, float]:
    """Measures an all-reduce of float32 ones. Every rank must call it with the same arguments.

    Returns:
        The median time in seconds, and the sum of the ones.
    """
    ones = tf.ones([num_bytes // 4])

    def on_replica(_: int) -> list:
        # A copy per replica, because TensorFlow treats a tensor shared by all replicas as already
        # summed.
        return replicas.all_reduce([tf.identity(ones)])

    @tf.function
    def reduce() -> list:
        return replicas.local_results(
            replicas.run(on_replica)
        )  # return everything, because TensorFlow prunes unused parts

    total, times = float(reduce()[0][0][0]), []  # traces, and synchronizes the ranks
    for _ in range(repeats):
        began = time.perf_counter()
        total = float(reduce()[0][0][0])  # waits for the sum
        times.append(time.perf_counter() - began)
    return statistics.median(times), total
