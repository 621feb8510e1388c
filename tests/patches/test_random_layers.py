"""Random layers: each replica draws its rows of the numbers that one device draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.gpu_paths.step_graph import Order, step_graphs
from tests.support.training import X, Y, assert_close, assert_same_weights, building
from tfdist import Trainer
from tfdist.checkpoint.settings import Checkpoints
from tfdist.strategies.one_device import OneDevice

STRATEGIES = ["mirrored", "central_storage", "towers"]
NUM_ROWS, WIDTH = 8, 16
LAYERS = {
    "dropout": lambda seed: layers.Dropout(0.5, seed=seed),
    "gaussian_noise": lambda seed: layers.GaussianNoise(1.0, seed=seed),
    "gaussian_dropout": lambda seed: layers.GaussianDropout(0.5, seed=seed),
}


class NoiseRecorder(layers.Layer):
    """Records the noise that a random layer draws for each row, as the gradient of its weights.

    Input row i is one-hot at i. The output is the sum of the row's noise times its weights. The
    output is also the loss, so one step of gradient descent stores the negated noise.
    """

    def __init__(self, random: layers.Layer) -> None:
        super().__init__()
        self.random = random

    def build(self, shape: Any) -> None:
        self.noise = self.add_weight(shape=(NUM_ROWS, WIDTH), initializer="zeros")

    def call(self, inputs: Any, training: bool = False) -> Any:
        rows = inputs @ self.noise
        drawn = self.random(ops.ones_like(rows), training=training)
        return ops.sum(ops.stop_gradient(drawn) * rows, axis=-1, keepdims=True)


def draws(
    kind: str, seed: int, strategy: str, num_replicas: int = 2, epochs: int = 1, **options: Any
) -> Any:
    """Returns each row's noise, [rows, width], summed over the epochs of one step each."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((NUM_ROWS,)), NoiseRecorder(LAYERS[kind](seed))])
        model.compile(keras.optimizers.SGD(1.0), lambda _, y_pred: y_pred)
        return model

    trainer = tfdist.Trainer(build, strategy=strategy, devices=num_replicas, **options)
    x = np.eye(NUM_ROWS, dtype="float32")
    trainer.fit(x, x[:, :1], batch_size=NUM_ROWS, epochs=epochs, shuffle=False, verbose=0)
    return -NUM_ROWS * trainer.model.get_weights()[0]


def drawn_by_keras(kind: str, seed: int) -> Any:
    """Returns the noise that the layer draws for a full batch by itself."""
    layer = LAYERS[kind](seed)
    ones = np.ones((NUM_ROWS, WIDTH), "float32")
    return ops.convert_to_numpy(layer(ones, training=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", LAYERS)
def test_replicas_draw_the_rows_of_one_device(kind: str, strategy: str) -> None:
    noise = draws(kind, 3, strategy)
    np.testing.assert_allclose(noise, drawn_by_keras(kind, 3), rtol=1e-5, atol=1e-6)
    assert len(np.unique(noise, axis=0)) == NUM_ROWS


def test_replica_random_draws_different_numbers_on_each_replica() -> None:
    noise = draws("gaussian_noise", 3, "mirrored", replica_random=True)
    half, plain = NUM_ROWS // 2, drawn_by_keras("gaussian_noise", 3)
    np.testing.assert_allclose(noise[:half], plain[:half], rtol=1e-5, atol=1e-6)
    assert not np.isclose(noise[half:], plain[half:]).any()
    assert len(np.unique(noise, axis=0)) == NUM_ROWS


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_seed_draws_the_same_numbers(strategy: str) -> None:
    noise = draws("dropout", 3, strategy, epochs=2)
    np.testing.assert_array_equal(noise, draws("dropout", 3, strategy, epochs=2))
    assert not np.array_equal(noise, draws("dropout", 4, strategy, epochs=2))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_step_draws_new_numbers(strategy: str) -> None:
    first = draws("dropout", 3, strategy)
    second = draws("dropout", 3, strategy, epochs=2) - first
    assert not np.array_equal(first, second)


def test_strategies_draw_the_same_numbers() -> None:
    mirrored, *others = (draws("dropout", 3, strategy) for strategy in STRATEGIES)
    for other in others:
        np.testing.assert_array_equal(mirrored, other)


def test_one_device_draws_what_keras_draws() -> None:
    drawn = drawn_by_keras("dropout", 3)
    np.testing.assert_allclose(draws("dropout", 3, "one_device", 1), drawn, rtol=1e-6)


class TruncatedNoise(layers.Layer):
    """Adds truncated normal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.truncated_normal(ops.shape(inputs), seed=self.seed)


def test_dropout_draws_no_numbers_before_its_inputs_are_computed() -> None:
    build = building(
        lambda: [keras.Input((4,)), layers.Dense(3, name="hidden"), layers.Dropout(0.5)]
    )
    batches = tf.data.Dataset.from_tensors((tf.ones((8, 4)), tf.ones((8, 3))))
    graphs = step_graphs(OneDevice(), build, batches)  # of known size, which waits for nothing
    (draw,) = (node.name for node in graphs.nodes() if node.op == "StatelessRandomUniformV2")
    assert any("/hidden" in name for name in Order(graphs).before(draw))


@pytest.mark.check
def test_xla_draws_the_rows_of_one_device() -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        random = [create(seed) for seed, create in enumerate(LAYERS.values())]
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5), *random, TruncatedNoise(), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.001), "mse", jit_compile=True)
        return model

    x = np.random.default_rng(0).normal(size=(13, 6)).astype("float32")
    plain = build()
    plain.fit(x, x[:, :1], batch_size=9, epochs=2, shuffle=False, verbose=0)
    trainer = tfdist.Trainer(build, strategy="mirrored", devices=2)
    trainer.fit(x, x[:, :1], batch_size=9, epochs=2, shuffle=False, verbose=0)
    for found, expected in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class OddSize(layers.Layer):
    """Draws random numbers whose count cannot be traced back to the batch."""

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal((ops.shape(inputs)[0] + 0, 4), seed=1)


def fit(layer: type[layers.Layer], devices: int) -> None:
    """Trains a model of one layer for a step."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layer()])
        model.compile("sgd", "mse")
        return model

    x = np.ones((8, 4), "float32")
    tfdist.Trainer(build, devices=devices).fit(x, x, batch_size=8, verbose=0)


def test_numbers_that_cannot_be_split_by_row_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    fit(OddSize, devices=2)
    assert "Each replica draws its own random numbers of shape (None, 4)" in caplog.text


class Stateful(layers.Layer):
    """Draws with TensorFlow's stateful functions."""

    def call(self, inputs: Any) -> Any:
        return inputs + tf.random.normal(tf.shape(inputs)) + tf.random.uniform([4])


def test_stateful_draws_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    fit(Stateful, devices=1)
    assert not caplog.text
    fit(Stateful, devices=2)
    assert "draws its own numbers with tf.random.normal" in caplog.text
    assert "draws its own numbers with tf.random.uniform" in caplog.text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seed_state_matches_one_device(strategy: str) -> None:
    """The saved seed state counts steps, independently of the number of replicas."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5, seed=3), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    x, y = np.ones((15, 4), "float32"), np.ones((15, 1), "float32")
    plain = build()
    plain.fit(x, y, batch_size=6, epochs=2, verbose=0)
    trainer = tfdist.Trainer(build, strategy=strategy, devices=2)
    trainer.fit(x, y, batch_size=6, epochs=2, verbose=0)
    np.testing.assert_array_equal(
        trainer.model.layers[0].seed_generator.state, plain.layers[0].seed_generator.state
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_draws_nothing(strategy: str) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5, seed=3)])
        model.compile("sgd", "mse")
        return model

    x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
    trainer = tfdist.Trainer(build, strategy=strategy, devices=2)
    assert trainer.evaluate(x, x, batch_size=4, verbose=0) == 0.0
    np.testing.assert_array_equal(trainer.predict(x, batch_size=4, verbose=0), x)


class Sampled(layers.Layer):
    """Draws in inference as well, and adds a loss, as variational autoencoders do."""

    def __init__(self, seed: keras.random.SeedGenerator | None, record: Any) -> None:
        super().__init__()
        self.seed, self.record = seed, record

    def call(self, inputs: Any) -> Any:
        noise = keras.random.normal(ops.shape(inputs), seed=self.seed)
        if not tf.executing_eagerly():  # not in a probe
            tf.py_function(lambda value: self.record(float(value)), [noise[0, 0]], [])
        self.add_loss(ops.mean(inputs**2))
        return inputs + noise


@pytest.mark.parametrize("has_seed", [False, True])
def test_inference_draws_new_numbers_per_step(has_seed: bool) -> None:
    drawn: list[float] = []

    def build() -> keras.Model:
        seed = keras.random.SeedGenerator(1) if has_seed else None
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Sampled(seed, drawn.append)])
        model.compile("sgd", "mse")
        return model

    trainer = tfdist.Trainer(build, strategy="mirrored", devices=2)
    x = np.ones((6, 4), "float32")
    trainer.fit(x, x, batch_size=2, verbose=0)
    assert len(drawn) == len(set(drawn)) == 3  # Python of the user runs once per step
    trainer.evaluate(x, x, batch_size=2, verbose=0)
    assert len(drawn) == len(set(drawn)) == 6


# ---- seeds of resumed runs ----


FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 7, "shuffle": False, "verbose": 0}


class NoisyError(keras.losses.Loss):
    """The squared error with labels that have noise."""

    def __init__(self) -> None:
        super().__init__(name="noisy_error")
        self.seed = keras.random.SeedGenerator(5)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        noise = keras.random.normal(ops.shape(y_pred), seed=self.seed)
        return ops.mean((y_true + 0.3 * noise - y_pred) ** 2, axis=-1)


class NoisyMean(keras.metrics.Mean):
    """The mean of the outputs with noise."""

    def __init__(self) -> None:
        super().__init__(name="noisy_mean")
        self.seed = keras.random.SeedGenerator(3)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        noise = keras.random.uniform(ops.shape(y_pred), seed=self.seed)
        return super().update_state(y_pred + noise, sample_weight)


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    stack = [layers.Dense(6, "tanh"), layers.Dropout(0.4, seed=2), layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *stack])
    model.compile(keras.optimizers.SGD(0.1), NoisyError(), metrics=[NoisyMean()])
    return model


def test_random_numbers_continue_with_another_number_of_replicas(tmp_path: Path) -> None:
    plain = build()
    history = plain.fit(**FIT, epochs=3).history
    for replicas, epochs in ((2, 1), (3, 2), (1, 3)):
        checkpoints = Checkpoints(folder=tmp_path)
        trainer = Trainer(build, "towers", devices=replicas, checkpoints=checkpoints)
        result = trainer.fit(**FIT, epochs=epochs).history
    assert_same_weights(trainer.model, plain)
    assert_close(
        {name: values[-1:] for name, values in result.items()},
        {name: values[-1:] for name, values in history.items()},
    )
