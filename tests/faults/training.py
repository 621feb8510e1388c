"""What is killed: a small training that tells how far it is, and knows every row it has seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.store import Store
from tfdist.trainer import Trainer

NUM_ROWS, BATCH_SIZE, EPOCHS, EVERY = 32, 4, 3, 2
#: Options of a trainer, by strategy.
DEVICES = {"mirrored": 2, "parameter_server": 1}
#: Random layers draw other numbers on each replica, but the same ones in every run.
RANDOM = ("one_device", "mirrored")

_NOISE = np.random.default_rng(0)
ROWS = _NOISE.normal(size=(NUM_ROWS, 4)).astype("float32")
NUMBERS = np.arange(NUM_ROWS, dtype="float32")[:, None]

#: Told of what begins or has ended: `step`, `save`, `evaluation`.
Tell = Callable[[str], None]


@keras.saving.register_keras_serializable("tests.faults")
class TimesSeen(keras.metrics.Metric):
    """How often the row was seen, in this epoch, that was seen most often, or least often.

    The labels are the numbers of the rows.
    """

    def __init__(self, name: str, most: bool, **options: Any) -> None:
        super().__init__(name=name, **options)
        self._most = most
        self.times = self.add_variable((NUM_ROWS,), "zeros", name="times")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        numbers = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        self.times.assign_add(tf.math.bincount(numbers, minlength=NUM_ROWS, dtype=tf.float32))

    def result(self) -> Any:
        return keras.ops.max(self.times) if self._most else keras.ops.min(self.times)


class Telling(keras.callbacks.Callback):
    """Tells of steps and evaluations."""

    chief_only, only_reads = False, True

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._tell("step")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._tell("evaluation")


def build(random: bool) -> keras.Model:
    """A network with an optimizer that remembers; where it may, with layers that draw numbers."""
    keras.utils.set_random_seed(1)
    own = [layers.BatchNormalization(), layers.Dropout(0.3)] if random else []
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), *own, layers.Dense(1)])
    seen = [TimesSeen("most", True), TimesSeen("least", False)]
    model.compile(keras.optimizers.SGD(0.003, momentum=0.9), "mse", metrics=["mae", *seen])
    return model


def train(strategy: str, folder: Path, tell: Tell) -> None:
    """Trains, from wherever it was; writes `weights.npz` and `history.json` when it has ended."""
    keras.utils.set_random_seed(5)
    trainer = Trainer(
        lambda: build(strategy in RANDOM),
        strategy,
        devices=DEVICES.get(strategy),
        checkpoints=Checkpoints(folder / "checkpoints", every=EVERY, keep=2),
    )
    with telling_of_saves(tell):
        tell("begin")
        history = trainer.fit(
            ROWS, NUMBERS, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0,
            validation_data=(ROWS[:8], NUMBERS[:8]), validation_batch_size=BATCH_SIZE,
            callbacks=[Telling(tell)],
        ).history  # fmt: skip
    if trainer.strategy.is_chief:
        model = trainer.model
        values = [np.asarray(v.value) for v in model.variables + model.optimizer.variables]
        np.savez(folder / "half.npz", *values)
        (folder / "history.json").write_text(json.dumps(history))
        (folder / "half.npz").replace(folder / "weights.npz")


def telling_of_saves(tell: Tell) -> AbstractContextManager[Any]:
    """Within it, every save is told of as it begins."""
    write = Store.write

    def written(self: Store, *arguments: Any) -> str:
        tell("save")
        return write(self, *arguments)

    return mock.patch.object(Store, "write", written)
