"""User code never gets an empty per-replica batch, and padding has no effect."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.support.training import assert_close, assert_same_weights


class NeedsRows(layers.Layer):
    """Fails on an empty batch, as convolutions do; adds a loss, a metric and a state."""

    def build(self, shape: Any) -> None:
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.size = keras.metrics.Mean(name="size")

    def call(self, inputs: Any, training: bool = False) -> Any:
        with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(inputs)[0])]):
            inputs = tf.identity(inputs)
        self.add_loss(keras.ops.sum(inputs**2))
        self.size.update_state(keras.ops.mean(inputs, -1))
        if training:
            self.total.assign(self.total + keras.ops.sum(inputs))
        return inputs


def needs_rows(y_true: Any, y_pred: Any) -> Any:
    """A custom loss or metric that fails on an empty batch."""
    with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(y_true)[0])]):
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def build(batch_norm: bool) -> keras.Model:
    keras.utils.set_random_seed(1)
    row = keras.Input((3,))
    word = keras.ops.cast(keras.ops.abs(row[:, 0]) * 3, "int32")
    hidden = NeedsRows()(layers.Dense(3)(row) + layers.Embedding(20, 3)(word))
    if batch_norm:
        hidden = layers.BatchNormalization()(hidden)
    model = keras.Model(row, layers.Dense(1)(hidden))
    # Accumulation makes the table's gradient dense, which changes Adam on one device, too.
    adam, sgd = keras.optimizers.Adam(0.01, epsilon=1e-2), keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(adam if batch_norm else sgd, needs_rows, metrics=["mae", needs_rows])
    return model


@pytest.mark.parametrize(("devices", "accumulate"), [(3, 1), (2, 2)])
def test_last_batch_of_one_row_matches_one_device(devices: int, accumulate: int) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(5, 3)).astype("float32")
    y = random.normal(size=(5, 1)).astype("float32")
    options: dict[str, Any] = {"batch_size": 4, "verbose": 0}  # the last batch has one row
    build_model = functools.partial(build, batch_norm=accumulate == 1)
    plain = build_model()
    wanted = plain.fit(x, y, epochs=2, shuffle=False, **options)
    trainer = tfdist.Trainer(
        build_model, "mirrored", devices, accumulate, sync_batch_norm=accumulate == 1
    )
    found = trainer.fit(x, y, epochs=2, shuffle=False, **options)
    assert_close(found.history, wanted.history)
    assert_same_weights(trainer.model, plain)
    assert_close(trainer.evaluate(x, y, **options), plain.evaluate(x, y, **options))
    assert_close(trainer.predict(x, **options), plain.predict(x, **options))
