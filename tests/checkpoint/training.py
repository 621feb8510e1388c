"""A small training run with every kind of saved state, which can be interrupted at any batch."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.support.training import X, Y, building
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.store import Store
from tfdist.trainer import Trainer

#: Large enough to keep every checkpoint that a test needs.
MANY = 50


build = building(
    lambda: [
        keras.Input((4,)),
        layers.Dense(8, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        layers.Dense(1),
    ],
    lambda: keras.optimizers.Adam(1e-2),
    metrics=["mae"],
)
without_random_layers = building(
    lambda: [keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)],
    lambda: keras.optimizers.SGD(0.01, momentum=0.9),
)


class Interrupt(keras.callbacks.Callback):
    """Sends SIGINT to the process after some batches.

    Args:
        after: The loop, and its number of batches: `"train 3"`, `"test 5"`.
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
    """Trains four epochs of four steps, each with a validation of three.

    Args:
        folder: Folder of the checkpoints. A CSV log is written next to it.
        strategy: Name of the strategy; runs on two devices unless it is `one_device`.
        stop: As for `Interrupt`; training then raises KeyboardInterrupt.
        every: As for `Checkpoints`.
        build_model: Passed to the trainer.
        **options: Passed to `fit`.
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


def repeatable(folder: Path | str, **options: Any) -> Trainer:
    """Returns a trainer of the model without random layers on one device."""
    return Trainer(without_random_layers, "one_device", checkpoints=Checkpoints(folder, **options))


def weights_after(epochs: Sequence[int], folder: Path | str) -> list[np.ndarray]:
    """Returns the weights after runs that resume each other, up to some epochs each."""
    for number in epochs:
        trainer = repeatable(folder)
        trainer.fit(X, Y, epochs=number, batch_size=4, verbose=0)
    return trainer.model.get_weights()


def state(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Returns the complete result of a training run: variables, history, files."""
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
    """Returns the files of the newest checkpoint.

    Timestamps, Keras's name counters, and tokens in the names of files are left out.
    """
    store = Store(folder)
    paths = Path(store.path(store.places()[0])).iterdir()
    files = {re.sub(r"-\w{8}\.", ".", path.name): path.read_bytes() for path in paths}
    files["state.json"] = re.sub(rb'_\d+(?=[_/"\\])', b"", files["state.json"])
    manifest = json.loads(files.pop("manifest.json"))
    facts = {name: manifest[name] for name in ("step", "epoch", "ended", "logs")}
    return files | {"facts": json.dumps(facts).encode()}
