"""Batches are read as often as Keras reads them, where reading has effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.training import assert_close, mirrored

X = np.arange(20, dtype="float32").reshape(20, 1) / 20


def augmented() -> tf.data.Dataset:
    """Keras's pattern for augmentation, with a seed in a variable."""
    noise = keras.layers.GaussianNoise(1.0, seed=3)
    dataset = tf.data.Dataset.from_tensor_slices((X, X)).batch(5)
    return dataset.map(lambda x, y: (noise(x, training=True), y))


def counted() -> tf.data.Dataset:
    """A Python function with a counter."""
    count = iter(range(1000))
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(5)

    def add(x: Any) -> Any:
        number = tf.numpy_function(lambda: np.float32(next(count)), [], tf.float32)
        return x + tf.ensure_shape(number, ()), x

    return dataset.map(add)


class Random(keras.utils.PyDataset):
    """Draws random numbers, and has a batch less in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 4

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        rows = X[5 * i : 5 * i + 5]
        return rows + np.float32(np.random.normal()), rows

    def on_epoch_end(self) -> None:
        self.size = max(1, self.size - 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("data", [augmented, counted, Random])
@pytest.mark.parametrize("regularizer", [None, "l2"])
def test_data_with_effects_are_read_as_keras_reads_them(
    data: Callable[[], Any], regularizer: str | None
) -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        layer = keras.layers.Dense(1, activity_regularizer=regularizer)
        model = keras.Sequential([keras.Input((1,)), layer])
        metric = None
        if regularizer is None:  # which of the two needs a batch for its analysis
            metric = [keras.metrics.MeanMetricWrapper(lambda y, p: p, name="mean")]
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=metric)
        return model

    def run(runner: Any) -> Any:
        keras.utils.set_random_seed(2)
        batches = data()
        options = {"validation_data": batches} if data is Random else {}
        history = runner.fit(batches, epochs=3, verbose=0, **options).history
        return history, runner.predict(batches, verbose=0), np.random.random()

    assert_close(run(mirrored(build)), run(build()))
