"""Recipes made small, and trained for two steps as the training command would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.recipes.small import SMALL
from tfdist.run import flags, from_config, recipe
from tfdist.run.effect import Watched


def two_steps(
    name: str, strategy: str, devices: int, data_dir: str, *more: str
) -> dict[str, list[float]]:
    """Trains a recipe for two steps and one of validation.

    Args:
        name: One of `SMALL`.
        strategy: By name.
        devices: Of this process.
        data_dir: Where its data are written, once.
        *more: Further flags.

    Returns:
        The history of the training.
    """
    keras.utils.set_random_seed(0)
    given = [f"--recipe={name}", f"--strategy={strategy}", f"--devices={devices}"]
    config = flags.parse("", "", [*given, f"--data-dir={data_dir}", *SMALL[name], *more])
    workload, watched = recipe.find(name), Watched(config)
    made = from_config.make_strategy(config)
    data, validation = from_config.make_data(watched.as_config(), workload, made)
    steps = recipe.num_steps(data)
    trainer = from_config.make_trainer(watched.as_config(), workload, made, steps)
    callbacks = from_config.make_callbacks(watched.as_config(), workload)
    watched.unread(workload)
    trained: dict[str, list[float]] = trainer.fit(
        data, validation_data=validation, callbacks=callbacks, epochs=1,
        steps_per_epoch=2, validation_steps=1, verbose=0, shuffle=False,
    ).history  # fmt: skip
    return trained


def is_sound(history: dict[str, Any]) -> bool:
    """Whether losses of training and of validation are there, and all numbers are finite."""
    return {"loss", "val_loss"} <= set(history) and bool(np.isfinite([*history.values()]).all())


def in_worker(data_dir: str) -> Any:
    """In a worker of Horovod: returns what trains a recipe, by its name."""
    from tfdist import strategies

    strategies.create("horovod")  # before anything starts TensorFlow
    return lambda name: two_steps(name, "horovod", 1, str(Path(data_dir)))
