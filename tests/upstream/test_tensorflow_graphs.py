"""What is traced for a training goes with it: a process may make any number of trainers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf

from tfdist import strategies


@pytest.mark.parametrize(("name", "devices"), [("one_device", 1), ("mirrored", 2)])
def test_graphs_go_with_their_function(name: str, devices: int) -> None:
    strategy = strategies.create(name, devices)
    seen: list[weakref.ref[Any]] = []

    def look() -> None:
        seen.append(weakref.ref(tf.compat.v1.get_default_graph()))

    class Step:
        training = True

        def __call__(self, total_rows: tf.Tensor, shares: Sequence[Any]) -> Any:
            """Exchanges by what has a gradient of its own, with a branch in it."""
            look()
            total = tf.cond(total_rows > 0, lambda: (look(), 1.0)[1], lambda: 0.0)
            return strategy.local_results(strategy.run(lambda _: strategy.all_reduce([total])))

        def logs(self) -> dict[str, Any]:
            look()
            return {}

    loop: Any = strategy.compile(Step())
    data = strategy.distribute(tf.data.Dataset.range(6).batch(2))
    made, _ = loop(iter(data), tf.constant(2))
    assert made.num_steps == 2
    assert len(seen) >= 3
    assert all(graph() for graph in seen)
    del loop
    gc.collect()
    assert not any(graph() for graph in seen)
