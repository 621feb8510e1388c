"""Limits of data, data that end early, saved positions, and how often batches are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.loops.test_epoch import Listener, run
from tests.support.training import assert_close, mirrored
from tfdist.loops.data_handler import limited_epochs, limited_steps_per_epoch
from tfdist.strategies.one_device import OneDevice
from tfdist.upstream import input_data

X = np.arange(20, dtype="float32").reshape(20, 1) / 20


@pytest.fixture
def limited() -> Iterator[None]:
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(1)
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


@pytest.mark.filterwarnings("ignore:Limiting")
@pytest.mark.usefixtures("limited")
def test_limits_of_keras_config() -> None:
    assert (limited_epochs(1), limited_epochs(5)) == (1, 2)
    assert (limited_steps_per_epoch(None), limited_steps_per_epoch(7)) == (1, 1)
    assert run(OneDevice()) == [1]


def test_default_config_has_no_limits() -> None:
    assert (limited_epochs(0), limited_epochs(5)) == (0, 5)
    assert (limited_steps_per_epoch(None), limited_steps_per_epoch(7)) == (None, 7)


def test_data_that_end_early_make_no_further_calls() -> None:
    events: list[str] = []
    with pytest.warns(UserWarning, match="ended after 3 of 7 steps"):
        run(OneDevice(), Listener("callback", events), steps_per_epoch=7)
    assert events[-2:] == ["callback from 2", "callback to 2"]


_ARRAY = np.arange(12.0)[:, None]
_CHOSEN = tf.data.Options()
_CHOSEN.autotune.ram_budget = 2**20


@pytest.mark.parametrize(
    ("x", "tuned"),
    [
        pytest.param(_ARRAY, False, id="arrays"),
        pytest.param(((batch,) for batch in _ARRAY), False, id="generator"),
        pytest.param(tf.data.Dataset.from_tensors(_ARRAY), False, id="data set"),
        pytest.param(
            tf.data.Dataset.from_tensors(_ARRAY).with_options(_CHOSEN), True, id="chosen budget"
        ),
    ],
)
def test_an_iterator_has_no_thread_that_delays_its_end(x: Any, tuned: bool) -> None:
    dataset = input_data.dataset_of(input_data.data_adapter(x, shuffle=False))
    at_the_end = dataset.map(lambda *batch: batch, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    assert (at_the_end.options().autotune.enabled is not False) == tuned


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
