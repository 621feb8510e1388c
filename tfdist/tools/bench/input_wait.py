"""Measures how long a model on one core waits for an input pipeline on another core."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import keras
import tensorflow as tf

import pipelines
from tfdist.errors import DeviceError
from tfdist.tools.bench import input_readers, machine, photographs
from tfdist.tools.bench.photographs import Photographs

GOAL = 0.02
_BATCH_SIZE = 16
_FILTERS = (16, 32, 64, 64)  # several times slower on one core than decoding a batch
_STEPS = 40
_WARM_UP_STEPS = 5


def measure(found: Photographs) -> dict[str, float]:
    """Trains a network that is slower than its input.

    Returns:
        `data_wait`, the fraction of time in which steps waited for data; `goal`; `steps`;
        `step_ms`; and `batch_ms`, the time per batch of the input without the model.

    Raises:
        DeviceError: There are fewer than two cores, or the system cannot bind threads to them.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise DeviceError("--with-model binds threads to cores, which only Linux can.")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise DeviceError("--with-model needs two cores, one for the model and one for the input.")
    with machine.on_cores(cores[:1]):
        tf.identity(0)  # starts TensorFlow's threads on the model's core
    with machine.on_cores(cores[1:2]):
        batches = _input(found)  # its threads inherit this core
        begin = time.perf_counter()
        for _ in range(_STEPS):
            next(batches)
        batch_ms = (time.perf_counter() - begin) / _STEPS * 1e3
    with machine.on_cores(cores[:1]):
        waited = total = 0.0
        step = _training_step()
        for number in range(_WARM_UP_STEPS + _STEPS):
            begin = time.perf_counter()
            images, labels = next(batches)
            ready = time.perf_counter()
            float(step(images, labels))  # waits for the step, also on a GPU
            if number >= _WARM_UP_STEPS:
                waited += ready - begin
                total += time.perf_counter() - begin
    return {
        "data_wait": waited / total,
        "goal": GOAL,
        "steps": _STEPS,
        "step_ms": total / _STEPS * 1e3,
        "batch_ms": batch_ms,
    }


def _input(images: Photographs) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    dataset = pipelines.read(
        images.shards,
        _BATCH_SIZE,
        shuffle_buffer=input_readers.SHUFFLE_BUFFER,
        seed=input_readers.SEED,
        decode_images=False,
        last_batch="drop",
        augment_fn=lambda example, seed: (
            input_readers.augment(example["image"], seed),
            example["label"],
        ),
        tuning=pipelines.Tuning(num_threads=1),
    )
    batches = iter(dataset.repeat())
    next(batches)
    return batches


def _training_step() -> tf.types.experimental.PolymorphicFunction:
    model = keras.Sequential([keras.Input((*input_readers.SIZE, 3))])
    for filters in _FILTERS:
        model.add(keras.layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu"))
        model.add(keras.layers.Conv2D(filters, 3, padding="same", activation="relu"))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(photographs.NUM_CLASSES, activation="softmax"))
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        # Normalize on the device, because transferring uint8 needs a quarter of the bytes.
        images = tf.cast(images, tf.float32) / 127.5 - 1
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables))
        return value

    return step
