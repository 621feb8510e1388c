"""One measurement of `compare`: prints seconds of processor time by quantity as JSON.

    python one_measurement.py step|start|input SHARDS [smoke]

It runs with the packages of either tree. Therefore it uses only the public API, and imports nothing
from this package.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import pipelines
import tfdist

_BATCH_SIZE, _CLASSES = 64, 10


def main(what: str, shards: str, smoke: bool) -> None:
    """Measures and prints."""
    quantities = {"step": _step, "start": _start, "input": _input}[what]
    print(json.dumps(dict(quantities(shards, smoke))))


def _model(conv: bool) -> keras.Model:
    random.seed(0)  # Keras's initializers draw their seeds from here
    layers = keras.layers
    hidden = (
        [layers.Conv2D(32, 3, padding="same", activation="relu"), layers.GlobalAveragePooling2D()]
        if conv
        else [layers.Flatten(), layers.Dense(32, "relu"), layers.Dense(32, "relu")]
    )
    model = keras.Sequential([keras.Input((8, 8, 1)), *hidden, layers.Dense(_CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss, metrics=["accuracy"])
    return model


class _LastEpoch(keras.callbacks.Callback):
    """Measures the processor time of the last epoch."""

    seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began = time.process_time()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.process_time() - self._began


def _data() -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    x = rng.random((8 * _BATCH_SIZE, 8, 8, 1), np.float32)
    y = rng.integers(0, _CLASSES, len(x))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(_BATCH_SIZE, True).cache().repeat()


def _step(shards: str, smoke: bool) -> Iterator[tuple[str, float]]:
    """Seconds per step of two networks on one device and on two replicas."""
    for number in (2, 1):  # devices are created once, for the larger number
        for conv, steps in ((False, 1024), (True, 256)):
            steps = 4 if smoke else steps
            strategy = "one_device" if number == 1 else "mirrored"
            trainer = tfdist.Trainer(functools.partial(_model, conv), strategy, number)
            timer = _LastEpoch()
            trainer.fit(
                _data(), epochs=2, steps_per_epoch=steps, verbose=0, shuffle=False,
                callbacks=[timer],
            )  # fmt: skip
            yield f"step, {'CNN' if conv else 'MLP'}, {strategy}", timer.seconds / steps


def _start(shards: str, smoke: bool) -> Iterator[tuple[str, float]]:
    """Seconds of a first fit of one step on four replicas."""
    rng = np.random.default_rng(0)
    x, y = rng.random((16, 32, 32, 3), np.float32), rng.integers(0, _CLASSES, 16)

    def build() -> keras.Model:
        if smoke:
            model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Flatten()])
            model.add(keras.layers.Dense(_CLASSES))
        else:
            model = keras.applications.ResNet50(
                weights=None, input_shape=x.shape[1:], classes=_CLASSES, classifier_activation=None
            )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    began = time.process_time()
    trainer = tfdist.Trainer(build, "mirrored", 2 if smoke else 4)
    trainer.fit(x, y, batch_size=len(x), verbose=0, shuffle=False)
    yield "first step, mirrored", time.process_time() - began


def _input(shards: str, smoke: bool) -> Iterator[tuple[str, float]]:
    """Seconds per image of the input pipeline."""

    def crop(example: Any, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.image.resize(example["image"], (64, 64)), example["label"]

    batches = iter(pipelines.read(shards, 32, shuffle_buffer=100, seed=1, augment_fn=crop).repeat())
    next(batches)
    number = 2 if smoke else 25
    began = time.process_time()
    for _ in range(number):
        next(batches)
    yield "input, per image", (time.process_time() - began) / (32 * number)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "smoke" in sys.argv[3:])
