"""A large embedding table in host memory, stored once, for devices that cannot hold a copy each.

Synthetic ratings: some users like many items, some items are liked by many users. Without flags,
this file runs the steps of the strategy explicitly; with flags, it is the training command.

Command:  python recipes/central_storage_big_embedding.py
          python recipes/central_storage_big_embedding.py --set num_items=10000000 --devices 4
          python -m tfdist.train --recipe central_storage_big_embedding
Hardware: GPUs with less memory than the table; without any, two logical CPU devices
Result:   96 % validation accuracy after 5 epochs with a table of 12.8 MB: 30 s on two CPU cores
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from pydantic import BaseModel, PositiveInt

import tfdist
from tfdist import schedules, train
from tfdist.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {
    "strategy": "central_storage",
    "epochs": 5,
    "batch_size": 256,
    "learning_rate": 0.05,
}
#: Overrides for `--smoke`.
SMOKE: Mapping[str, Any] = {
    "batch_size": 64,
    "set": {"num_items": 2000, "num_ratings": 2000},
}


class Hyperparameters(BaseModel):
    """Hyperparameters, which `--set NAME=VALUE` sets."""

    num_users: PositiveInt = 500
    num_items: PositiveInt = 200_000
    width: PositiveInt = 16
    num_ratings: PositiveInt = 40_000


def run_explicitly() -> None:
    """Does step by step what `--strategy central_storage` does."""
    config = TrainConfig(**DEFAULTS)
    keras.utils.set_random_seed(config.seed)

    # 1. Replicas on all devices; the variables are on the host.
    strategy = tfdist.strategies.create("central_storage", parameter_device="CPU:0")

    # 2. The scope places every variable there, so that the table exists only once.
    data, held_out = train_data(config), validation_data(config)
    trainer = tfdist.Trainer(lambda: build_model(config, len(data)), strategy)

    # 3. A replica fetches the rows that its part of the batch uses. Only the gradients of those
    #    rows (tf.IndexedSlices) are sent back, and they are summed on the host.
    trainer.fit(data, epochs=config.epochs, validation_data=held_out, verbose=2)

    place = strategy.describe()["parameters on"]
    for weight in trainer.model.trainable_variables:
        megabytes = 4e-6 * np.prod(weight.shape)
        print(f"{weight.path}: {megabytes:.3g} MB on {place}")
    trainer.model.save("central_storage_big_embedding.keras")


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled network, which predicts whether a user likes an item."""
    hp, layers = Hyperparameters.model_validate(config.set), keras.layers
    user, item = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
    vectors = [
        layers.Embedding(hp.num_users, hp.width, name="users")(user),
        layers.Embedding(hp.num_items, hp.width, name="items")(item),
    ]
    hidden = layers.Dense(32, activation="relu")(layers.concatenate(vectors))
    model = keras.Model([user, item], layers.Dense(1)(hidden))
    # Adagrad updates only the rows of a batch; Adam updates the whole table.
    rate = schedules.learning_rate(config, steps_per_epoch)
    model.compile(
        keras.optimizers.Adagrad(rate, initial_accumulator_value=1e-8),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
        jit_compile=config.jit_compile,
        run_eagerly=config.run_eagerly,
    )
    return model


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches `((int32 users, int32 items), float32 likes)`, shuffled."""
    hp = Hyperparameters.model_validate(config.set)
    rows = tf.data.Dataset.from_tensor_slices(_ratings(hp, seed=1))
    return rows.shuffle(hp.num_ratings, seed=config.seed).batch(config.batch_size)


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns batches of other ratings by the same users of the same items."""
    hp = Hyperparameters.model_validate(config.set)
    return tf.data.Dataset.from_tensor_slices(_ratings(hp, seed=2)).batch(config.batch_size)


def _ratings(hp: Hyperparameters, seed: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    moods = np.random.default_rng(0).normal(size=hp.num_users)
    draw = np.random.default_rng(seed)
    user = draw.integers(hp.num_users, size=hp.num_ratings)
    # A few items get most ratings, as in real data.
    item = np.minimum(draw.zipf(1.3, hp.num_ratings), hp.num_items) - 1
    likes = moods[user] + 2.0 * np.sin(2.0 * (item + 1)) > 0  # a quality per item
    return (user.astype("int32"), item.astype("int32")), likes[:, np.newaxis].astype("float32")


if __name__ == "__main__":
    if flags := sys.argv[1:]:
        sys.exit(train.main(["--recipe", __file__, *flags]))
    run_explicitly()
