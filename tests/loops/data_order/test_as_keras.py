"""Shuffled datasets yield the same order as in Keras's `fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.loops.data_handler import DataHandler
from tfdist.strategies.one_device import OneDevice

NUM_ROWS, BATCH = 12, 4


@keras.saving.register_keras_serializable()
class Twice(keras.layers.Layer):
    """A custom layer, for which the trainer reads a batch before training."""

    def call(self, x: Any) -> Any:
        return 2 * x


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), Twice(), keras.layers.Dense(1)])
    model.layers[-1].set_weights([np.full((1, 1), 0.1), np.zeros(1)])
    model.compile(keras.optimizers.SGD(0.02), "mse", steps_per_execution=2)
    return model


def shuffled() -> tf.data.Dataset:
    def row(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.cast(number, tf.float32)[None] / NUM_ROWS
        return x, tf.sin(9.0 * x)

    return tf.data.Dataset.range(NUM_ROWS).map(row).shuffle(NUM_ROWS, seed=1).batch(BATCH)


def train(trainer: Any, model: keras.Model) -> list[list[np.ndarray]]:
    """Returns the weights after each of several calls that share a dataset."""
    data, other, found = shuffled(), shuffled(), []
    for options in (
        {"epochs": 3},
        {"epochs": 3, "validation_data": data},
        {"epochs": 2, "steps_per_epoch": NUM_ROWS // BATCH, "validation_data": data},
        {"epochs": 2, "validation_data": other, "validation_steps": 2},
        {"epochs": 2, "callbacks": [StopsAt(1)]},
        {"epochs": 1},
    ):
        logs = trainer.fit(data, verbose=0, **options).history
        found.append([*model.get_weights(), np.ravel(logs.get("val_loss", 0.0))])
    found.append([np.ravel(trainer.predict(data, verbose=0)) for _ in range(2)])
    return found


class StopsAt(keras.callbacks.Callback):
    """Stops training within an epoch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch >= self._batch


@pytest.mark.parametrize(
    "strategy", [pytest.param("one_device", marks=pytest.mark.long), "mirrored"]
)
def test_dataset_order_matches_keras(strategy: str) -> None:
    plain = build()
    trainer = tfdist.Trainer(build, strategy, 1 if strategy == "one_device" else 2)
    for wanted, found in zip(train(plain, plain), train(trainer, trainer.model), strict=True):
        for one, another in zip(wanted, found, strict=True):
            np.testing.assert_allclose(another, one, 1e-5, 1e-6)


@pytest.mark.parametrize("at_once", [1, 3])
def test_first_epoch_of_unknown_size_limits_the_others(at_once: int) -> None:
    limit = tf.Variable(0, dtype=tf.int64)
    grow = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: limit.assign([5, 9, 2, 12][epoch])
    )

    def data() -> tf.data.Dataset:
        rows = tf.data.Dataset.range(NUM_ROWS).shuffle(NUM_ROWS, seed=1).filter(lambda i: i < limit)
        return rows.map(lambda i: 2 * (tf.cast(i, tf.float32)[None] / NUM_ROWS,)).batch(2)

    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.set_weights([np.full((1, 1), 0.1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=at_once)
        return model

    wanted = make().fit(data(), epochs=4, verbose=0, callbacks=[grow]).history["loss"]
    trainer = tfdist.Trainer(make, "mirrored", 2)
    losses = trainer.fit(data(), epochs=4, verbose=0, callbacks=[grow]).history["loss"]
    np.testing.assert_allclose(losses, wanted, 1e-5)


def test_resumed_training_knows_the_size_of_the_first_epoch() -> None:
    feed, resumed = (
        DataHandler(OneDevice(), shuffled().filter(lambda *_: True), True) for _ in "12"
    )
    feed.begin_epoch()
    feed.end_epoch(3, exhausted=True)
    resumed.restore(feed.state(0))
    for one in (feed, resumed):
        one.begin_epoch()
    assert [one.num_left(0, 9) for one in (feed, resumed)] == [4, 4]


@pytest.mark.parametrize("peeked_epochs", [(), (0,), (0, 1)])
def test_resumed_shuffling_skips_completed_passes(peeked_epochs: tuple[int, ...]) -> None:
    wanted, data = [], shuffled()
    for _ in range(4):
        wanted.append([*data])
        iter(data)  # as Keras's `EpochIterator._enumerate_iterator` does after each epoch
    state: dict[str, Any] | None = None
    for number in range(4):  # each epoch in a new handler, as in a new process
        feed = DataHandler(OneDevice(), shuffled(), training=True)
        if number in peeked_epochs:
            tf.nest.map_structure(np.testing.assert_array_equal, feed.first_batch(), wanted[0][0])
        if state is not None:
            feed.restore(state)
        batches = [
            OneDevice().feed.unpack(element).shares[0].rows for element in feed.begin_epoch()
        ]
        feed.end_epoch(len(batches), exhausted=False)
        tf.nest.map_structure(np.testing.assert_array_equal, batches, wanted[number])
        state = feed.state(0)
