"""What a strategy takes from its process group, and what a subclass must define."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.groups.base import LocalGroup
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.one_device import OneDevice


def test_single_process_communicates_with_itself() -> None:
    alone = OneDevice()
    np.testing.assert_array_equal(alone.group.gather([3.0, 4.0]), [[3.0, 4.0]])
    assert alone.group.is_chief
    context = alone.feed.input_context()
    assert (context.num_input_pipelines, context.num_replicas_in_sync) == (1, 1)
    alone.group.barrier()


def test_strategy_without_all_reduce_cannot_be_created() -> None:
    class Incomplete(Strategy):
        def run(self, fn: ReplicaFn) -> Any:
            return fn(0)

        def local_results(self, results: Any) -> list[Any]:
            return [results]

        def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
            return [fn(results)]

    with pytest.raises(TypeError, match=r"abstract method.* all_reduce"):
        Incomplete(["CPU:0"])  # type: ignore[abstract]


def test_process_group_multiplies_the_replicas() -> None:
    class Second(LocalGroup):
        size, rank = 3, 1

        def gather(self, numbers: Sequence[float]) -> np.ndarray:
            exchanged.append(numbers)
            return np.array([numbers] * 3, np.float64)

    exchanged: list[Sequence[float]] = []
    strategy = OneDevice("CPU:0", Second())
    assert (strategy.num_replicas, strategy.first_replica, strategy.group.rank) == (3, 1, 1)
    assert not strategy.group.is_chief
    assert strategy.group.size > 1
    element = strategy.feed.split(tf.range(7), own_rows=False)
    assert int(element.num_rows) == 7
    assert element.shares[0].rows.numpy().tolist() == [2, 3]
    exchanged.clear()
    strategy.group.barrier()
    assert exchanged, "the barrier did not wait for the other processes"
