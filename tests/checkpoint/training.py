"""A small training with everything that a checkpoint has to hold, stopped wherever one likes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.support.training import X, Y
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.store import Store
from tfdist.trainer import Trainer

#: Keeps all checkpoints that a test may ask for.
MANY = 50


def build() -> keras.Model:
    """A network with random layers and moving statistics."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    return model


class Interrupt(keras.callbacks.Callback):
    """Sends SIGINT to the process after some batches.

    Args:
        after: Of which loop, and how many of its batches: `"train 3"`, `"test 5"`.
    """

    chief_only, only_reads = False, True

    def __init__(self, after: str) -> None:
        super().__init__()
        self._after, self._made = after, {"train": 0, "test": 0}

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._count("train")

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._count("test")

    def _count(self, loop: str) -> None:
        self._made[loop] += 1
        if self._after == f"{loop} {self._made[loop]}":
            os.kill(os.getpid(), signal.SIGINT)


def fit(
    folder: Path,
    strategy: str = "one_device",
    stop: str = "",
    every: str | int = "epoch",
    build_model: Any = build,
    **options: Any,
) -> Trainer:
    """Trains four epochs of four steps, each with an evaluation of three.

    Args:
        folder: Of the checkpoints, and of a CSV file beside them.
        strategy: By which, over two devices if it takes several.
        stop: As `Interrupt`; then the training ends with KeyboardInterrupt.
        every: As of `Checkpoints`.
        build_model: Of the trainer.
        **options: Of `fit`.
    """
    checkpoints = Checkpoints(folder, every=every, keep=MANY)
    devices = None if strategy == "one_device" else 2
    trainer = Trainer(build_model, strategy, devices=devices, checkpoints=checkpoints)
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5),
        keras.callbacks.CSVLogger(str(folder.with_suffix(".csv"))),
        *([Interrupt(stop)] if stop else []),
    ]
    data: dict[str, Any] = {"x": X, "y": Y, "batch_size": 4, "validation_data": (X[:9], 1 - Y[:9])}
    data |= {"epochs": 4, "callbacks": callbacks, "verbose": 0}
    trainer.fit(**{name: v for name, v in (data | options).items() if v is not None})
    return trainer


def state(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Everything that a training has come to: variables, history, files."""
    model = trainer.model
    variables = model.variables + model.optimizer.variables + model.metrics_variables
    return {
        "variables": [np.asarray(v.value) for v in variables],
        "history": model.history.history,
        "epochs": model.history.epoch,
        "csv": folder.with_suffix(".csv").read_text(),
        "checkpoint": newest(folder),
    }


def newest(folder: Path) -> dict[str, bytes]:
    """The files of the newest checkpoint, but for clock times and the numbers in Keras's names."""
    store = Store(folder)
    files = {path.name: path.read_bytes() for path in Path(store.path(store.places()[0])).iterdir()}
    files["state.json"] = re.sub(rb'_\d+(?=[_/"\\])', b"", files["state.json"])
    manifest = json.loads(files.pop("manifest.json"))
    told = {name: manifest[name] for name in ("step", "epoch", "ended", "logs")}
    return files | {"told": json.dumps(told).encode()}
