"""Workers that wait for nobody: each trains at its own pace on variables that servers hold.

Made points in 20 dims, one of five classes each. Without flags this file shows the wrap in the
open, step by step; with flags it is the training command.

Command:  python recipes/parameter_server_async.py
          python recipes/parameter_server_async.py --devices 4 --num-servers 2
          python -m tfdist.launch --num-workers 3 --num-ps 1 --recipe parameter_server_async
Hardware: CPU hosts of unequal speed, or that come and go; here a cluster within one process
Result:   0.93 of other points after 5 epochs; a gradient is half an update late on average, one at
          most, and all 320 updates are counted: 26 s on two busy cores
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import schedules, train
from tfdist.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {
    "strategy": "parameter_server",
    "epochs": 5,
    "batch_size": 64,
    "learning_rate": 0.05,
}
_NUM_CLASSES, _NUM_DIMS, _NUM_POINTS = 5, 20, 4096


def in_the_open() -> None:
    """What `--strategy parameter_server` does, line by line; this process is the chief."""
    config = TrainConfig(**DEFAULTS)
    keras.utils.set_random_seed(config.seed)

    # 1. Workers and a server. A TF_CONFIG with chief, worker and ps would name processes; without,
    #    two workers and a server are made in this one. It comes before anything else.
    strategy = tfdist.strategies.create("parameter_server", num_servers=1)

    # 2. Variables go to the servers in turn. The workers have none of their own.
    data, held_out = train_data(config), validation_data(config)
    trainer = tfdist.Trainer(lambda: build_model(config, len(data)), strategy)

    # 3. The chief hands each batch to whichever worker is free. That one fetches the weights,
    #    computes the gradient of the whole batch and updates them at once: no sum over replicas,
    #    so batch_size is what one update sees, and the rate need not grow with the workers.
    trainer.fit(data, epochs=config.epochs, validation_data=held_out, verbose=2)

    # 4. The price: a gradient is of weights that others have changed since. How often, and that
    #    no update was lost, is counted.
    for name, value in strategy.summary().items():
        print(f"{name}: {value}")
    print(f"updates: {int(trainer.model.optimizer.iterations)}")
    trainer.model.save("parameter_server_async.keras")


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled network."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((_NUM_DIMS,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(_NUM_CLASSES),
        ]
    )
    # No momentum: asynchrony is one by itself (Mitliagkas et al. 2016, arXiv:1605.09774).
    rate = schedules.learning_rate(config, steps_per_epoch)
    model.compile(
        keras.optimizers.SGD(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=config.jit_compile,
        run_eagerly=config.run_eagerly,
    )
    return model


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns batches `(float32 (batch, 20), int64 (batch,))`, shuffled by the seed."""
    rows = tf.data.Dataset.from_tensor_slices(_points(seed=1))
    return rows.shuffle(_NUM_POINTS, seed=config.seed).batch(config.batch_size)


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns batches of other points of the same classes, in a fixed order."""
    return tf.data.Dataset.from_tensor_slices(_points(seed=2)).batch(config.batch_size)


def _points(seed: int) -> tuple[np.ndarray, np.ndarray]:
    middles = np.random.default_rng(0).normal(size=(_NUM_CLASSES, _NUM_DIMS))
    draw = np.random.default_rng(seed)
    labels = draw.integers(_NUM_CLASSES, size=_NUM_POINTS)
    points = middles[labels] + 1.5 * draw.normal(size=(_NUM_POINTS, _NUM_DIMS))
    return points.astype("float32"), labels


if __name__ == "__main__":
    if flags := sys.argv[1:]:
        sys.exit(train.main(["--recipe", __file__, *flags]))
    in_the_open()
