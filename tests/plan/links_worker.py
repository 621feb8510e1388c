"""A process of `tests.plan.links`: answers each line of its input with a line of seconds.

    python -m tests.plan.links_worker RANK ADDRESSES

ADDRESSES are those of all workers, by rank, with commas between them.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import cluster, strategies
from tfdist.strategies.collectives.bandwidth import measure

#: Bytes of the sums that are timed.
SIZES = (1_000_000, 4_000_000, 16_000_000)
#: A network of 1.1 million weights; rows of each worker, and steps that are timed.
UNITS, FEATURES, ROWS, STEPS = 1024, 64, 64, 16


def build() -> keras.Model:
    """A network of which the gradients are most of the work."""
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(UNITS), layers.Dense(UNITS), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return model


class Clock(keras.callbacks.Callback):
    """Takes the time of each step."""

    ends: list[float]

    def on_train_begin(self, logs: Any = None) -> None:
        self.ends = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


class Steps:
    """Steps of a trainer, on so many rows each, over all workers that it has."""

    def __init__(self, strategy: strategies.Strategy, num_rows: int) -> None:
        self.trainer = tfdist.Trainer(build, strategy=strategy, steps_per_call=1)
        batch = np.ones((num_rows, FEATURES), "float32"), np.ones((num_rows, 1))
        self._data = tf.data.Dataset.from_tensors(batch).repeat()

    def seconds(self, num_steps: int = STEPS) -> float:
        """Returns what a step takes, the median of so many."""
        clock = Clock()
        self.trainer.fit(self._data, steps_per_epoch=num_steps, verbose=0, callbacks=[clock])
        return float(np.median(np.diff(clock.ends)))


def main(rank: int, addresses: list[str]) -> None:
    """Joins the others and measures as often as it is told to."""
    me = cluster.discover(workers=addresses, rank=rank)
    cluster.use(me)
    joined = Steps(strategies.create("multi_worker", 1), ROWS * len(addresses))
    joined.seconds()
    cluster.leave()
    alone = Steps(strategies.create("one_device", 1), ROWS)
    alone.seconds()
    cluster.use(me)
    weights = joined.trainer.model.trainable_variables
    num_bytes = 4 * sum(int(np.prod(w.shape)) for w in weights)
    for _ in sys.stdin:
        strategy = joined.trainer.strategy
        sums = [measure(strategy, size, repeats=7)[0] for size in SIZES]
        # The sum above has all begin at a time; many steps, so that they go on at a time too.
        found = {"sums": sums, "compute": alone.seconds(4 * STEPS), "step": joined.seconds()}
        print(json.dumps(found | {"bytes": num_bytes}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","))
