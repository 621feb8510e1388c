"""Reduction inference in custom steps does not depend on the initial weights or the first batch.

With its initial weights, each case looks like a mean or a sum, or is zero. The fast test compares
the inferred reduction with the known one; the long test trains the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.support.training import computing_in
from tfdist import strategies
from tfdist.custom_step import trial
from tfdist.custom_step.trial import infer_reductions
from tfdist.rows import Reduction

NUM_ROWS = 6
X = np.random.default_rng(0).normal(size=(NUM_ROWS, 4))
Y = np.random.default_rng(1).normal(size=(NUM_ROWS, 1))


class Adversary(keras.Model):
    """Trains with one function in place of its loss, its log, its state, or its metric."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(1)
        nearly_zero = keras.initializers.RandomNormal(stddev=1e-4, seed=1)
        self.gate = self.add_weight(shape=(), initializer="zeros", name="gate")
        self.router = self.add_weight(shape=(4, 3), initializer=nearly_zero, name="router")
        self.state = self.add_weight(shape=(), initializer="ones", trainable=False, name="state")
        self.value = keras.metrics.Sum(name="value")

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x, training=True) - y) ** 2)
            loss += self.of("loss", x) if "loss" in self.functions else 0.0
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        if "state" in self.functions:
            self.state.assign(self.of("state", x))
        logs = {"log": self.of("log", x) if "log" in self.functions else self.optimizer.iterations}
        if "metric" in self.functions:
            self.value.update_state(self.of("metric", x))
            logs["value"] = self.value.result()
        return logs

    def of(self, name: str, x: Any) -> Any:
        return self.functions[name](self, x)


def num_rows(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], x.dtype)


FULL, MEAN, SUM, SAME = "full batch", Reduction.MEAN, Reduction.SUM, Reduction.SAME

#: Functions of a step by what it does with them, and their reductions.
CASES: dict[str, tuple[str, Callable[..., Any], Any]] = {
    "load of a router": (
        "loss",
        lambda s, x: 3 * ops.sum(ops.square(ops.mean(ops.softmax(x @ s.router), axis=0))),
        FULL,
    ),
    "gated deviation": ("loss", lambda s, x: s.gate * ops.var(x), FULL),
    "hinge that is zero": ("loss", lambda s, x: ops.relu(ops.mean(s(x)) - 9), FULL),
    "clipped mean": ("loss", lambda s, x: ops.clip(ops.mean(s(x) ** 2), -9, 9), FULL),
    "gated sum": ("loss", lambda s, x: s.gate * ops.sum(x**2), FULL),
    "gated mean": ("loss", lambda s, x: s.gate * ops.mean(x**2), MEAN),
    "mask of all ones": (
        "loss",
        lambda s, x: (
            ops.sum(s(x)[:, 0] * ops.cast(x[:, 0] > -9, x.dtype))
            / ops.sum(ops.cast(x[:, 0] > -9, x.dtype))
        ),
        FULL,
    ),
    "branch that is not taken": (
        "loss",
        lambda s, x: tf.cond(
            ops.mean(x) > 9, lambda: ops.mean(s(x)) ** 2, lambda: ops.mean(s(x) ** 2)
        ),
        FULL,
    ),
    "penalty on weights": ("loss", lambda s, x: ops.sum(s.router**2), MEAN),
    "log of a mean": ("log", lambda s, x: ops.mean(s(x) ** 2), MEAN),
    "log that is zero": ("log", lambda s, x: ops.sum(ops.relu(x - 9)), SUM),
    "log of rows": ("log", lambda s, x: num_rows(x), SUM),
    "log of a maximum": ("log", lambda s, x: ops.relu(ops.max(x) - 9), FULL),
    "log of a weight": ("log", lambda s, x: s.gate, MEAN),
    "moving mean": ("state", lambda s, x: 0.9 * s.state + 0.1 * ops.mean(x), MEAN),
    "moving variance": ("state", lambda s, x: 0.9 * s.state + 0.1 * s.gate * ops.var(x), FULL),
    "largest mean": ("state", lambda s, x: ops.maximum(s.state, ops.mean(x)), FULL),
    "rows seen": ("state", lambda s, x: s.state + num_rows(x), SUM),
    "large entries": ("state", lambda s, x: s.state + ops.sum(ops.cast(x > 9, x.dtype)), SUM),
    "batches with large entries": (
        "state",
        lambda s, x: s.state + ops.cast(ops.any(x > 9), x.dtype),
        FULL,
    ),
    "metric of a sum": ("metric", lambda s, x: ops.sum(x**2), SUM),
    "metric of a sum that is zero": ("metric", lambda s, x: ops.sum(ops.relu(x - 9)), SUM),
    "metric of a mean": ("metric", lambda s, x: ops.mean(x**2), MEAN),
    "metric of a flag": ("metric", lambda s, x: ops.cast(ops.any(x > 9), x.dtype), FULL),
}


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def build(name: str) -> keras.Model:
    target, function, _ = CASES[name]
    keras.utils.set_random_seed(1)
    model = Adversary({target: function})
    model.build((None, 4))
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    return model


@pytest.mark.parametrize("name", CASES)
def test_initial_weights_do_not_mislead_reduction_inference(name: str) -> None:
    strategy = strategies.create("one_device", 1)
    with strategy.scope():
        model = build(name)
    batch = (tf.constant(X), tf.constant(Y))
    built = trial.build(model, strategy, "train_step", batch)
    plan = infer_reductions(model, built, model.train_step, {}, batch)
    target, _, expected = CASES[name]
    if expected is FULL:
        assert plan.full_batch_reason
        return
    assert plan.full_batch_reason is None
    found = {
        "loss": lambda: plan.gradients[0],
        "log": lambda: plan.logs["log"],
        "state": lambda: plan.states[id(model.state)],
        "metric": lambda: plan.states[id(model.value.variables[0])],
    }
    assert found[target]() == expected


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_trains_as_on_one_device(name: str) -> None:
    fit: dict[str, Any] = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
    x, y = np.tile(X, (3, 1)) * [[1, 20, -1, 3]], np.tile(Y, (3, 1))
    trained, logs = [], []
    for runner in (build(name), tfdist.Trainer(lambda: build(name), "mirrored", devices=2)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logs.append(runner.fit(x, y, **fit).history)
        model = getattr(runner, "model", runner)
        trained.append([keras.ops.convert_to_numpy(v) for v in model.variables])
    for expected, found in zip(*trained, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    for key, expected in logs[0].items():
        np.testing.assert_allclose(logs[1][key], expected, rtol=1e-9, atol=1e-9)
