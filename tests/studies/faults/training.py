"""A small training run that reports its progress and counts how often it sees each row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfdist.checkpoint import joint_save
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.store import Store
from tfdist.strategies.sharded.strategy import Sharded
from tfdist.trainer import Trainer

NUM_ROWS, BATCH_SIZE, EPOCHS, EVERY = 32, 4, 3, 2
#: Options of the trainer, by variant: a strategy, and possibly what else is special.
OPTIONS: dict[str, dict[str, Any]] = {
    "one_device": {},
    "mirrored": {"devices": 2},
    "mirrored accumulate": {"devices": 2, "accumulate": 2},
    "mirrored mixed_float16": {"devices": 2, "precision": "mixed_float16"},
    "central_storage": {"devices": 2},
    "sharded": {"devices": 2},
    "sharded ranks": {},
    "sharded elastic": {},
    "pipeline": {"devices": 2},
    "tensor_parallel": {"devices": 2},
    "parameter_server": {"devices": 1},
    "multi_worker": {},
    "horovod": {},
    "horovod elastic": {},
}
#: Each rank writes its shards, of the layer with enough weights.
BY_RANKS = ("sharded ranks", "sharded elastic")
_SMALLEST = 8
#: Random layers are reproducible from run to run, but draw other numbers on each replica.
RANDOM = ("one_device", "mirrored")
#: Another number of workers adds up in another order. In float64, only a fault is visible then.
DOUBLE = ("horovod elastic", "sharded elastic")

_NOISE = np.random.default_rng(0)
ROWS = _NOISE.normal(size=(NUM_ROWS, 4)).astype("float32")
NUMBERS = np.arange(NUM_ROWS, dtype="float32")[:, None]

#: Reports that a `step`, `save` or `evaluation` begins or has ended.
Report = Callable[[str], None]


@keras.saving.register_keras_serializable("tests.studies.faults")
class TimesSeen(keras.metrics.Metric):
    """The maximum or minimum over rows of how often a row was seen in this epoch.

    The labels are the row numbers.
    """

    def __init__(self, name: str, most: bool, **options: Any) -> None:
        super().__init__(name=name, **options)
        self._most = most
        self.times = self.add_variable((NUM_ROWS,), "zeros", name="times")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        numbers = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        # Unlike `bincount`, this is recognized as a sum over rows, which accumulation needs.
        rows = tf.one_hot(numbers, NUM_ROWS, dtype=self.times.dtype)
        self.times.assign_add(tf.reduce_sum(rows, 0))

    def result(self) -> Any:
        return keras.ops.max(self.times) if self._most else keras.ops.min(self.times)


class Reporter(keras.callbacks.Callback):
    """Reports steps and evaluations."""

    chief_only, only_reads = False, True

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._report("step")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._report("evaluation")


def build(random: bool) -> keras.Model:
    """Returns a network with a stateful optimizer and, on request, random layers."""
    keras.utils.set_random_seed(1)
    noisy = [layers.BatchNormalization(), layers.Dropout(0.3)] if random else []
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), *noisy, layers.Dense(1)])
    seen = [TimesSeen("most", True), TimesSeen("least", False)]
    model.compile(keras.optimizers.SGD(0.003, momentum=0.9), "mse", metrics=["mae", *seen])
    return model


def train(variant: str, folder: Path, report: Report) -> None:
    """Trains from the newest checkpoint; writes `weights.npz` and `history.json` at the end.

    Args:
        variant: A key of `OPTIONS`.
        folder: Folder of checkpoints and results.
        report: Is called with each step, save and evaluation.
    """
    keras.utils.set_random_seed(5)
    keras.config.set_floatx("float64" if variant in DOUBLE else "float32")
    trainer = Trainer(
        lambda: build(variant in RANDOM),
        Sharded(smallest=_SMALLEST) if variant in BY_RANKS else variant.partition(" ")[0],
        **OPTIONS[variant],
        checkpoints=Checkpoints(folder / "checkpoints", every=EVERY, keep=2),
    )
    with reporting_saves(report):
        report("begin")
        history = trainer.fit(
            ROWS, NUMBERS, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0,
            validation_data=(ROWS[:8], NUMBERS[:8]), validation_batch_size=BATCH_SIZE,
            callbacks=[Reporter(report)],
        ).history  # fmt: skip
    if trainer.strategy.group.is_chief:
        model = trainer.model
        values = [np.asarray(v.value) for v in model.variables + model.optimizer.variables]
        np.savez(folder / "half.npz", *values)
        (folder / "history.json").write_text(json.dumps(history))
        (folder / "half.npz").replace(folder / "weights.npz")
    trainer.strategy.group.barrier()  # the chief reads the shards of the others


@contextmanager
def reporting_saves(report: Report) -> Iterator[None]:
    """Reports the beginning of every save inside the context."""

    def reporting(write: Callable[..., Any]) -> Callable[..., Any]:
        def written(*arguments: Any) -> Any:
            report("save")
            return write(*arguments)

        return written

    with (
        mock.patch.object(Store, "write", reporting(Store.write)),
        mock.patch.object(joint_save, "write_part", reporting(joint_save.write_part)),
    ):
        yield
