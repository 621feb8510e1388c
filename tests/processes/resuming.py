"""A scenario in which one of two workers is interrupted, and training resumes.

Each worker has a separate folder, as on two hosts: rank 1 receives the state from rank 0.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.checkpoint.training import Interrupt
from tests.support.training import X, Y, build
from tfdist.checkpoint.settings import Checkpoints
from tfdist.strategies.base import Strategy
from tfdist.trainer import Trainer

#: Four steps per epoch. An interruption after 5 steps leaves accumulated gradients.
FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 4, "epochs": 3, "verbose": 0}


def accumulating() -> keras.Model:
    """Returns a network whose optimizer updates the weights every third batch."""
    return build(keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3))


def stops_and_resumes(strategy: Strategy) -> dict[str, Any]:
    """Returns the states of an uninterrupted and an interrupted run, and the number of files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = _train(strategy, folder / "reference")
        interrupted = 0
        try:
            _train(strategy, folder / "stopped", "train 5" if strategy.group.rank else "")
        except KeyboardInterrupt:
            interrupted = 1
        resumed = _train(strategy, folder / "stopped")
        return {
            "reference": reference,
            "resumed": resumed,
            "interrupted": strategy.group.gather([interrupted]),
            "num_files": strategy.group.gather([len(list(folder.glob("*/*/manifest.json")))]),
        }


def _train(strategy: Strategy, folder: Path, stop: str = "") -> list[np.ndarray]:
    checkpoints = Checkpoints(folder, keep=9)
    trainer = Trainer(accumulating, strategy, steps_per_call=1, checkpoints=checkpoints)
    callbacks = [keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True)]
    history = trainer.fit(**FIT, callbacks=[*callbacks, *([Interrupt(stop)] if stop else [])])
    model = trainer.model
    variables = model.variables + model.optimizer.variables
    return [np.asarray(v.value) for v in variables] + [np.asarray(history.history["loss"])]


SCENARIOS: list[Callable[[Strategy], Any]] = [stops_and_resumes]
