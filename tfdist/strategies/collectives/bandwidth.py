"""How long a sum over the replicas takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

_REPEATS = 5


class Replicas(Protocol):
    """A strategy, as far as a measurement needs one."""

    def run(self, fn: Callable[[int], Any]) -> Any:
        """Calls `fn(index)` on every replica of this process."""

    def local_results(self, results: Any) -> list[Any]:
        """Returns what `run` returned as a list."""

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        """Returns tensors reduced over all replicas; called on a replica."""


def measure(replicas: Replicas, num_bytes: int, repeats: int = _REPEATS) -> tuple[float, float]:
    """Adds up ones of float32 over all replicas; every rank calls it with the same numbers.

    Args:
        replicas: Those of a strategy.
        num_bytes: Of the tensor on each of them.
        repeats: How often.

    Returns:
        The median time in seconds, and the sum of the ones.
    """
    ones = tf.ones([num_bytes // 4])

    def on_replica(_: int) -> list:
        # One tensor a replica: TensorFlow takes what all of them share for summed already.
        return replicas.all_reduce([tf.identity(ones)])

    @tf.function
    def reduce() -> list:
        return replicas.local_results(replicas.run(on_replica))  # whole: the rest is not computed

    total, times = float(reduce()[0][0][0]), []  # traces, and makes the ranks wait for each other
    for _ in range(repeats):
        began = time.perf_counter()
        total = float(reduce()[0][0][0])  # waits for the sum
        times.append(time.perf_counter() - began)
    return statistics.median(times), total
