"""Asynchronous training: each worker updates variables on parameter servers at its own pace.

Synthetic points in 20 dimensions, of five classes. Without flags, this file runs the steps of the
strategy explicitly; with flags, it is the training command.

Command:  python recipes/parameter_server_async.py
          python recipes/parameter_server_async.py --devices 4 --num-servers 2
          python -m tfdist.launch --num-workers 3 --num-ps 1 --recipe parameter_server_async
Hardware: CPU hosts of unequal speed, or that come and go; here a cluster within one process
Result:   93 % validation accuracy after 5 epochs; gradient staleness of 0.5 updates on average, at
          most 1; none of 320 updates lost: 26 s on two CPU cores
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


def run_explicitly() -> None:
    """Does step by step what `--strategy parameter_server` does; this process is the chief."""
    config = TrainConfig(**DEFAULTS)
    keras.utils.set_random_seed(config.seed)

    # 1. Workers and a server. TF_CONFIG with chief, worker and ps would name processes; without it,
    #    two workers and a server run in this process. Create the strategy before anything else.
    strategy = tfdist.strategies.create("parameter_server", num_servers=1)

    # 2. Variables are placed on the servers round-robin. The workers store none.
    data, held_out = train_data(config), validation_data(config)
    trainer = tfdist.Trainer(lambda: build_model(config, len(data)), strategy)

    # 3. The chief schedules each batch on a free worker, which fetches the weights, computes the
    #    gradients of the batch and applies them immediately. Nothing is summed over replicas, so
    #    batch_size is the batch of one update, and the learning rate needs no scaling.
    trainer.fit(data, epochs=config.epochs, validation_data=held_out, verbose=2)

    # 4. The price is staleness: other workers may have updated the weights since a gradient was
    #    computed. The statistics count how often, and that no update was lost.
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
    # No momentum: asynchrony has the same effect (Mitliagkas et al. 2016, arXiv:1605.09774).
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
    run_explicitly()
