"""Steps of one network of layers that wait, on one device and in stages."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import devices
from tfdist.bench.interleave import ratio, spread, take_turns
from tfdist.bench.pipeline.waiting import NUM_THREADS, network
from tfdist.strategies import Strategy, create
from tfdist.strategies.pipeline import bubble
from tfdist.trainer import Trainer

_ROWS, _LAYERS = 32, 4


def all_of(
    stages: Sequence[int],
    micro_batches: Sequence[int],
    orders: Sequence[str],
    step_ms: int,
    steps: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Returns the speed-up of each number of stages and micro-batches in each order.

    Args:
        stages: Numbers of stages; the network has four layers.
        micro_batches: Numbers of them.
        orders: `"gpipe"`, `"1f1b"`.
        step_ms: For which one device waits in a step.
        steps: Of a measurement.
        rounds: Measurements of each.
    """
    tf.config.threading.set_inter_op_parallelism_threads(NUM_THREADS)
    devices.configure(max(stages))
    build = functools.partial(network, _LAYERS, step_ms / _ROWS)
    cases = [(n, order, m) for n in stages for order in orders for m in micro_batches]
    alone = _steps(build, create("one_device", 1), steps)
    results = []
    for n, order, m in cases:
        strategy = create("pipeline", n, micro_batches=m, order=order)
        contenders = {"one device": alone, "pipeline": _steps(build, strategy, steps)}
        taken = take_turns(contenders, rounds)
        ideal = bubble.speed_up([1 / n] * n, m)
        found = ratio(taken["one device"], taken["pipeline"])
        results.append(
            {
                "stages": n,
                "order": order,
                "micro_batches": m,
                "ideal": ideal,
                "speed_up": found._asdict(),
                "of_ideal": found.median / ideal,
                "step_ms": spread([1e3 * t for t in taken["pipeline"]])._asdict(),
                "samples_s": taken,
            }
        )
    return results


class _Ends(keras.callbacks.Callback):
    """Notes when each step has ended, so that what `fit` does before the first is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter())


def _steps(build: Callable[[], Any], strategy: Strategy, steps: int) -> Callable[[], float]:
    """Returns a function that makes steps and returns the seconds of one; it is warmed up."""
    trainer = Trainer(build, strategy=strategy, steps_per_call=1)
    rows = np.ones((_ROWS * (steps + 1), 1), "float32")

    def run() -> float:
        ends = _Ends()
        trainer.fit(rows, rows, batch_size=_ROWS, shuffle=False, verbose=0, callbacks=[ends])
        return float(np.median(np.diff(ends.seconds)))

    run()
    return run
