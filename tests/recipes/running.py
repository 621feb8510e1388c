"""Trains small versions of recipes for two steps, as the training command does."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfdist
from tests.recipes.small import SMALL
from tfdist.run import flags, from_config, recipe
from tfdist.run.effect import Watched
from tfdist.trainer import Trainer


def two_steps(name: str, strategy: str, devices: int, data_dir: str) -> Trainer:
    """Trains a recipe for two steps and one of validation.

    Args:
        name: Name of the recipe.
        strategy: Name of the strategy.
        devices: Number of devices of this process.
        data_dir: Folder of the recipes' data.

    Returns:
        The trainer, whose `model.history` is that of the training.
    """
    keras.utils.set_random_seed(0)
    given = [f"--recipe={name}", f"--strategy={strategy}", f"--devices={devices}"]
    small = SMALL.get(name, ["--batch-size=8"])
    config = flags.parse("", "", [*given, f"--data-dir={data_dir}", *small])
    workload, watched = recipe.find(name), Watched(config)
    created = from_config.make_strategy(config)
    data, validation = from_config.make_data(watched.as_config(), workload, created)
    steps = recipe.num_steps(data)
    trainer = from_config.make_trainer(watched.as_config(), workload, created, steps)
    callbacks = from_config.make_callbacks(watched.as_config(), workload)
    watched.unread(workload)
    trainer.fit(
        data, validation_data=validation, callbacks=callbacks, epochs=1,
        steps_per_epoch=2, validation_steps=1, verbose=0, shuffle=False,
    )  # fmt: skip
    return trainer


def is_finite(history: dict[str, Any]) -> bool:
    """Returns whether there are training and validation metrics, and all numbers are finite."""
    is_validated = any(name.startswith("val_") for name in history)
    return is_validated and bool(np.isfinite([*history.values()]).all())


def create_training(data_dir: str) -> Any:
    """Runs in a worker of Horovod: returns a function that trains a recipe, given its name.

    The chief also makes a second model after each training, so that Keras then numbers the names of
    layers and operations differently on each rank.
    """
    from tfdist import strategies

    strategies.create("horovod")  # before anything starts TensorFlow

    def train(name: str) -> Any:
        model = two_steps(name, "horovod", 1, data_dir).model
        if tfdist.is_chief():
            keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model))
        return model.history.history

    return train
