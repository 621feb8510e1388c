"""Trains small versions of recipes for two steps, as the training command does."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfdist
from tfdist.run import flags, from_config, recipe
from tfdist.run.from_config import Watched
from tfdist.trainer import Trainer


def two_steps(name: str, strategy: str, devices: int, data_dir: str) -> Trainer:
    """Trains a recipe for two steps and one of validation.

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


# ---- small versions of recipes ----


_CNN = ["--model=cnn", "--set=filters=[4, 8]", "--set=units=8", "--batch-size=6"]

#: Flags by recipe.
SMALL: dict[str, list[str]] = {
    "digits": ["--batch-size=6"],
    "cifar10_resnet": ["--data=small", "--set=width=4", "--set=num_blocks=[1]", "--batch-size=6"],
    "imagenet_resnet50": ["--data=small", *_CNN, "--set=image_size=16"],
    "celeba_attributes": ["--data=small", "--set=image_size=16", "--set=filters=[4, 8]"],
    "unet_segmentation": [
        "--data=small", "--set=image_size=16", "--set=filters=2", "--set=depth=1", "--batch-size=6"
    ],
    "xception_cats": ["--data=small", *_CNN, "--set=image_size=16", "--set=frozen_epochs=1"],
    "gpt_text": ["--data=small", "--set=size=tiny", "--set=length=8", "--batch-size=6"],
    "finetune": ["--data=small", "--set=length=16", "--batch-size=6"],
    "mnist_autoencoder": ["--data=small", "--set=filters=[2, 2]", "--batch-size=6"],
    "vit_small": [
        "--data=small", "--set=size=micro", "--set=patch=8", "--set=image_size=16",
        "--set=randaugment=1", "--batch-size=6",
    ],
    "image_folder": ["--data=small", *_CNN, "--set=image_size=16", "--set=mixup=0.2"],
    "table": ["--data=synthetic", "--set=units=[4]", "--batch-size=6"],
    "text_classifier": ["--data=small", "--set=length=8", "--set=width=4", "--batch-size=6"],
    "central_storage_big_embedding": ["--set=num_items=100", "--set=num_ratings=1000"],
}  # fmt: skip
