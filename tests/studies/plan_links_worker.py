"""A process of `tests.studies.plan_links`: answers each line of its input with seconds as JSON.

    python -m tests.studies.plan_links_worker RANK ADDRESSES

ADDRESSES are those of all workers by rank, separated by commas.
"""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import cluster, strategies
from tfdist.groups.traffic import measure_all_reduce
from tfdist.tools.plan.step_profile import StepTimes

#: Bytes of the measured sums.
SIZES = (1_000_000, 4_000_000, 16_000_000)
#: A network of 1.1 million weights; rows per worker and steps of a measurement.
UNITS, FEATURES, ROWS, STEPS = 1024, 64, 64, 16


def build() -> keras.Model:
    """Returns a network with little compute time and large gradients."""
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(UNITS), layers.Dense(UNITS), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return model


class Steps:
    """Steps of a trainer on batches of `num_rows` over all its workers."""

    def __init__(self, strategy: strategies.Strategy, num_rows: int) -> None:
        self.trainer = tfdist.Trainer(build, strategy=strategy, steps_per_call=1)
        batch = np.ones((num_rows, FEATURES), "float32"), np.ones((num_rows, 1))
        self._data = tf.data.Dataset.from_tensors(batch).repeat()

    def seconds(self, num_steps: int = STEPS) -> float:
        """Returns the median time of `num_steps` steps."""
        times = StepTimes()
        self.trainer.fit(self._data, steps_per_epoch=num_steps, verbose=0, callbacks=[times])
        return times.seconds()


def main(rank: int, addresses: list[str]) -> None:
    """Joins the other workers, and answers requests."""
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
        sums = [measure_all_reduce(strategy, size, repeats=7)[0] for size in SIZES]
        # The sums above synchronize the start. With many steps all workers compute throughout.
        results = {"sums": sums, "compute": alone.seconds(4 * STEPS), "step": joined.seconds()}
        print(json.dumps(results | {"bytes": num_bytes}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","))
