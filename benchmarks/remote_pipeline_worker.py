"""The training process of `benchmarks remote_pipeline`: answers each line of its input with a line.

    python -m benchmarks.remote_pipeline_worker DEVICES FEATURES STEP_MS STEPS

A line of the input is a number of micro-batches. The answer has the seconds of a step, and the
bytes that this host sent and received in a step.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from benchmarks.remote_pipeline import LAYERS, ROWS
from benchmarks.waiting_layers import Hold, WaitingLayer
from tfdist.tools.plan.step_profile import StepTimes

_COUNTERS = Path("/sys/class/net/wire/statistics")


class Sleeps(WaitingLayer):
    """Waits where it is computed.

    The wait is that of a data set, because Python functions do not run on a device server.
    """

    def holder(self, inputs: tf.Tensor) -> Hold:
        del inputs
        return _hold


def _hold(values: tf.Tensor, row_ms: float) -> tf.Tensor:
    milliseconds = row_ms * tf.cast(tf.shape(values)[0], tf.float32)
    wait = _wait()
    if tf.executing_eagerly():
        wait(values[0, 0], milliseconds)
        return tf.identity(values)
    # Stateful operations would wait for each other, even on different devices; this one is not.
    wait.add_to_graph(tf.compat.v1.get_default_graph())
    # An element of the values, so that the wait begins when they are there.
    args = [values[0, 0], milliseconds]
    with tf.control_dependencies(tf.raw_ops.PartitionedCall(args=args, Tout=[tf.float32], f=wait)):
        return tf.identity(values)


@functools.cache
def _wait() -> Any:
    """Returns a function of a number and milliseconds, which returns the number after that time."""

    def wait(value: tf.Tensor, milliseconds: tf.Tensor) -> tf.Tensor:
        kinds: dict[str, Any] = {"output_types": [tf.float32], "output_shapes": [[]]}
        one = tf.raw_ops.TensorDataset(components=[value], output_shapes=[[]])
        # It waits before the element, and again before the end of the data set.
        half = tf.cast(milliseconds * 1e3 / 2, tf.int64)
        late = tf.raw_ops.SleepDataset(input_dataset=one, sleep_microseconds=half, **kinds)
        return tf.raw_ops.DatasetToSingleElement(dataset=late, **kinds)[0]

    number = tf.TensorSpec([], tf.float32)
    with tf.init_scope(), tf.device(None):
        return tf.function(wait).get_concrete_function(number, number)


def main(devices: list[str], features: int, step_ms: float, num_steps: int) -> None:
    """Connects to the servers and answers questions."""

    def build() -> keras.Model:
        parts = [Sleeps(step_ms / 3 / ROWS / LAYERS) for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((features,)), *parts])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        return model

    rows = np.ones((ROWS * num_steps, features), "float32")
    targets = np.ones((len(rows), 1), "float32")
    for line in sys.stdin:
        strategy = tfdist.strategies.create(
            "pipeline", devices, micro_batches=int(line), order="gpipe"
        )
        trainer = tfdist.Trainer(build, strategy=strategy, steps_per_call=1)
        times, sent, before = StepTimes(), {}, {}
        for _ in range(2):  # the first time traces
            times = StepTimes()
            before = _counters()
            trainer.fit(rows, targets, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[times])
        sent = {name: (count - before[name]) / num_steps for name, count in _counters().items()}
        print(json.dumps({"seconds": times.seconds(), **sent}), flush=True)


def _counters() -> dict[str, int]:
    return {name: int((_COUNTERS / name).read_text()) for name in ("tx_bytes", "rx_bytes")}


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
