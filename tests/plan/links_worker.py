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
SIZES = (250_000, 1_000_000, 4_000_000)
#: A network of 1.1 million weights, next to no arithmetic.
UNITS, FEATURES, ROWS, STEPS = 1024, 64, 16, 8


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


def main(rank: int, addresses: list[str]) -> None:
    """Joins the others and measures as often as it is told to."""
    cluster.use(cluster.discover(workers=addresses, rank=rank))
    joined = tfdist.Trainer(build, strategy=strategies.create("multi_worker", 1), steps_per_call=1)
    rows = ROWS * len(addresses)
    data = tf.data.Dataset.from_tensors((np.ones((rows, FEATURES), "float32"), np.ones((rows, 1))))
    clock = Clock()

    def step() -> float:
        joined.fit(data.repeat(), steps_per_epoch=STEPS, verbose=0, callbacks=[clock])
        return float(np.median(np.diff(clock.ends)))

    step()
    weights = sum(int(np.prod(w.shape)) for w in joined.model.trainable_variables)
    for _ in sys.stdin:
        sums = [measure(joined.strategy, size, repeats=7)[0] for size in SIZES]
        print(json.dumps({"sums": sums, "step": step(), "bytes": 4 * weights}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","))
