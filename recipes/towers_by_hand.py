"""Data parallelism by hand: one tower per device; one device sums and applies the gradients.

The digits of scikit-learn (1,797 images of 8x8), a network of two layers, SGD with momentum.
Without flags, this file runs the steps of the strategy explicitly; with flags, it is the training
command.

Command:  python recipes/towers_by_hand.py
          python recipes/towers_by_hand.py --strategy towers --devices 2
          python -m tfdist.train --recipe towers_by_hand
Hardware: the GPUs of one host; without any, two logical CPU devices
Result:   90.28 % validation accuracy after 10 epochs: 17 s on two CPU cores
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import tfdist
from recipes._basics import build_model, train_data, validation_data
from tfdist import train
from tfdist.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {
    "strategy": "towers",
    "epochs": 10,
    "batch_size": 64,
    "learning_rate": 0.1,
}


def run_explicitly() -> None:
    """Trains in a loop that does not use `tf.distribute`."""
    devices = tfdist.devices.resolve(None, 2)  # all GPUs, or two logical CPU devices
    config = TrainConfig(**DEFAULTS)
    keras.utils.set_random_seed(config.seed)
    data, held_out = train_data(config), validation_data(config)

    # 1. One set of variables, on the parameter device.
    with tf.device("CPU:0"):
        model = build_model(config, len(data))
        model.optimizer.build(model.trainable_variables)
    step = tower_step(model, devices)

    # 2. Every tower reads those variables, which change once per step, after all have finished.
    for epoch in range(config.epochs):
        for images, labels in data:
            loss = step(images, labels)
        accuracy = model.evaluate(held_out, verbose=0, return_dict=True)["accuracy"]
        print(f"epoch {epoch + 1}: last loss {float(loss):.4f}, val_accuracy {accuracy:.4f}")
    model.save("towers_by_hand.keras")


def tower_step(model: keras.Model, devices: Sequence[str]) -> Callable[..., tf.Tensor]:
    """Returns a function that makes one step on a global batch and returns its mean loss.

    Args:
        model: A model whose optimizer is built.
        devices: Devices with one tower each.
    """
    weights = model.trainable_variables
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        rows = tf.shape(images)[0]
        losses, gradients = [], []
        for number, device in enumerate(devices):
            # 1. A part of the rows; the parts differ in size by at most one row.
            begin = rows * number // len(devices)
            end = rows * (number + 1) // len(devices)
            with tf.device(device), tf.GradientTape() as tape:
                # 2. The sum over its rows, not their mean, because the parts differ in size.
                losses.append(loss_fn(labels[begin:end], model(images[begin:end], training=True)))
            gradients.append(tape.gradient(losses[-1], weights))
        # 3. The sums over the towers, divided by the number of all rows, are the mean gradients.
        divisor = tf.cast(rows, tf.float32)
        means = [tf.add_n(parts) / divisor for parts in zip(*gradients, strict=True)]
        # 4. One update.
        model.optimizer.apply(means, weights)
        return tf.add_n(losses) / divisor

    return step


if __name__ == "__main__":
    if flags := sys.argv[1:]:
        sys.exit(train.main(["--recipe", __file__, *flags]))
    run_explicitly()
