"""Reduction inference does not depend on the initial weights or on the first batch.

With its initial weights, each case looks like a mean, a sum, or a row-by-row function. The fast
test compares the inferred reduction with the known one; the long test trains the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.conformance.engines import create_strategy
from tests.support.training import computing_in
from tfdist.rows import Reduction, Rows

NUM_ROWS = 6
X = np.random.default_rng(0).normal(size=(NUM_ROWS, 4))
Y = np.random.default_rng(1).normal(size=(NUM_ROWS, 1))


class Adversary(layers.Layer):
    """Calls a custom function, with weights that are zero or nearly zero at first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(name="adversary")
        self.function = function

    def build(self, shape: Any) -> None:
        nearly_zero = keras.initializers.RandomNormal(stddev=1e-4, seed=1)
        normal = keras.initializers.RandomNormal(seed=2)
        self.gate = self.add_weight(shape=(), initializer="zeros", name="gate")
        self.router = self.add_weight(shape=(4, 3), initializer=nearly_zero, name="router")
        self.a = self.add_weight(shape=(4, 2), initializer=normal, name="a")
        self.b = self.add_weight(shape=(2, 4), initializer="zeros", name="b")
        self.state = self.add_weight(shape=(), initializer="ones", trainable=False, name="state")

    def probabilities(self, x: Any) -> Any:
        return ops.softmax(x @ self.router)

    def call(self, inputs: Any) -> Any:
        return self.function(self, inputs)


def num_rows(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], x.dtype)


def _beside_the_last(x: Any) -> Any:
    """A loop over rows that keeps the last row in a variable."""
    rows = tf.TensorArray(x.dtype, 0, dynamic_size=True, element_shape=(4,)).unstack(x)
    results = tf.TensorArray(x.dtype, ops.shape(x)[0], element_shape=(4,))

    def add_last(i: Any, last: Any, found: Any) -> Any:
        row = rows.read(i)
        return i + 1, row, found.write(i, row + last)

    start = 0, tf.zeros((4,), x.dtype), results
    return tf.while_loop(lambda i, *_: i < ops.shape(x)[0], add_last, start)[2].stack()


def _squares_in_list(x: Any) -> Any:
    """A loop over rows that sets entries of a list with a fixed number of them."""
    squares = tf.TensorArray(x.dtype, NUM_ROWS, element_shape=())

    rows = tf.TensorArray(x.dtype, 0, dynamic_size=True, element_shape=(4,)).unstack(x)

    def add_row(i: Any, found: Any) -> Any:
        return i + 1, found.write(i, ops.sum(rows.read(i) ** 2))

    return tf.while_loop(lambda i, *_: i < ops.shape(x)[0], add_row, (0, squares))[1].stack()


def pairs(x: Any) -> Any:
    return ops.mean(ops.square(x[:, None] - x[None]), axis=-1)


@tf.custom_gradient
def with_clipped_gradient(x: Any) -> Any:
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.1)


@tf.custom_gradient
def with_reversed_gradient(x: Any) -> Any:
    return tf.identity(x), lambda upstream: -0.5 * upstream


def _scaled(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a product of rows and weights whose gradient combines the rows in its own way."""

    @tf.custom_gradient
    def product(x: Any, weights: Any) -> Any:
        return x * weights, lambda upstream: (upstream * weights, reduce(upstream * x, axis=0))

    return lambda s, x: product(x, tf.convert_to_tensor(s.router[:, 0]))


FULL, MEAN, SUM, ROWS = "full batch", Reduction.MEAN, Reduction.SUM, "row by row"

#: Losses that a layer adds, and how they have to be reduced over the rows.
LOSSES: dict[str, tuple[Callable[..., Any], Any]] = {
    "router's load": (
        lambda s, x: 1 + 3 * ops.sum(ops.square(ops.mean(s.probabilities(x), axis=0))),
        FULL,
    ),
    "router's load and choice": (
        lambda s, x: (
            3
            * ops.sum(
                ops.mean(ops.one_hot(ops.argmax(s.probabilities(x), -1), 3, dtype=x.dtype), 0)
                * ops.mean(s.probabilities(x), 0)
            )
        ),
        FULL,
    ),
    "gated deviation": (lambda s, x: s.gate * ops.std(x), FULL),
    "gated square of a mean": (lambda s, x: ops.mean(x**2) + s.gate * ops.mean(x) ** 2, FULL),
    "tiny second order": (lambda s, x: ops.mean(x**2) + 1e-9 * ops.mean(x) ** 2, FULL),
    "mask of all ones": (
        lambda s, x: ops.sum(x**2 * ops.cast(x > -9, x.dtype)) / ops.sum(ops.cast(x > -9, x.dtype)),
        FULL,
    ),
    "selected rows": (lambda s, x: ops.mean(tf.boolean_mask(x, x[:, 0] > -9) ** 2), FULL),
    "softmax of selected rows": (
        lambda s, x: ops.sum(tf.nn.softmax(kept := tf.boolean_mask(x[:, 0], x[:, 0] > 0)) * kept),
        FULL,
    ),
    "half of the selected rows": (lambda s, x: ops.sum(tf.boolean_mask(x, x[:, 0] > -9)[:2]), FULL),
    "running sum over selected rows": (
        lambda s, x: ops.sum(ops.cumsum(tf.boolean_mask(x, x[:, 0] > -9), axis=0)),
        FULL,
    ),
    "mean over selected rows of a sum": (
        lambda s, x: ops.mean(ops.sum(tf.boolean_mask(x[:, 0], x[:, 0] > -9)[None], axis=0)),
        FULL,
    ),
    "selected rows beside several weights": (
        lambda s, x: ops.mean(
            ops.sum(tf.boolean_mask(x[:, 0], x[:, 0] > -9) * ops.ones((3, 1), x.dtype), axis=0)
        ),
        FULL,
    ),
    "selected rows in groups of as many as there are rows": (
        lambda s, x: ops.sum(
            ops.max(ops.reshape(tf.boolean_mask(x, x[:, 0] > -9), (-1, ops.shape(x)[0])), axis=1)
        ),
        FULL,
    ),
    "sum over selected rows": (lambda s, x: ops.sum(tf.boolean_mask(x, x[:, 0] > 0) ** 2), FULL),
    "floor that is not reached": (lambda s, x: ops.maximum(ops.mean(x**2), -9.0), FULL),
    "hinge that is zero": (lambda s, x: ops.relu(ops.mean(x) - 9), FULL),
    "clipped mean": (lambda s, x: ops.clip(ops.mean(x), -9, 9), FULL),
    "branch of the batch": (
        lambda s, x: tf.cond(ops.mean(x) > 9, lambda: ops.mean(x) ** 2, lambda: ops.mean(x**2)),
        FULL,
    ),
    "branch of a weight": (
        lambda s, x: tf.cond(
            tf.convert_to_tensor(s.gate) > 0, lambda: ops.mean(x) ** 2, lambda: ops.mean(x**2)
        ),
        FULL,
    ),
    "all pairs": (lambda s, x: s.gate * ops.mean(pairs(x)), FULL),
    "entropy of the mean": (
        lambda s, x: ops.sum(
            ops.mean(s.probabilities(x), 0) * ops.log(ops.mean(s.probabilities(x), 0))
        ),
        FULL,
    ),
    "entropy of each row": (
        lambda s, x: ops.mean(ops.sum(s.probabilities(x) * ops.log(s.probabilities(x)), -1)),
        MEAN,
    ),
    "log of a mean": (lambda s, x: ops.log(ops.mean(ops.exp(s.gate * x))), FULL),
    "decorrelation": (
        lambda s, x: ops.sum(ops.square(ops.transpose(x @ s.router) @ x / num_rows(x))),
        FULL,
    ),
    "linear in a covariance": (
        lambda s, x: ops.sum(s.a @ s.b * (ops.transpose(x) @ x)) / num_rows(x),
        MEAN,
    ),
    "variance by moments": (lambda s, x: s.gate * (ops.mean(x**2) - ops.mean(x) ** 2), FULL),
    "sum over a square of rows": (lambda s, x: ops.sum(x**2) / num_rows(x) / num_rows(x), FULL),
    "function of rows over their number": (lambda s, x: ops.mean(ops.tanh(x / num_rows(x))), FULL),
    "sum over the rows": (lambda s, x: ops.sum(x**2) / num_rows(x), MEAN),
    "sum that is zero": (lambda s, x: s.gate * ops.sum(x**2), SUM),
    "mean that is zero": (lambda s, x: s.gate * ops.mean(x**2), MEAN),
    "of weights": (lambda s, x: ops.sum(s.router**2), MEAN),
    "sum and mean": (lambda s, x: ops.mean(x**2) + s.gate * ops.sum(x), FULL),
    "mean over two segments": (
        lambda s, x: ops.mean(ops.tanh(ops.concatenate([x, s.gate * x], 0)) ** 2),
        MEAN,
    ),
    "segments beside rows twice": (
        lambda s, x: ops.mean(
            ops.concatenate([x, -x], 0) * ops.reshape(x @ s.a @ s.b, (-1, 2))[:, :1]
        ),
        FULL,
    ),
    "segments beside draws": (
        lambda s, x: ops.sum(
            (joined := ops.concatenate([x, -x], 0)) * keras.random.normal(ops.shape(joined), seed=1)
        ),
        FULL,
    ),
    "segments beside draws of an operation": (
        lambda s, x: ops.sum(
            (joined := ops.concatenate([x, -x], 0))
            * tf.random.normal(tf.shape(joined), dtype=x.dtype)
        ),
        SUM,
    ),
    "rows and weights": (lambda s, x: ops.mean(ops.concatenate([x, s.b], 0) ** 2), FULL),
    "loop over steps": (
        lambda s, x: ops.mean(
            ops.fori_loop(0, 3, lambda i, y: ops.tanh(y) + ops.cast(x, y.dtype), x)
        ),
        MEAN,
    ),
    "hinge of all rows within a loop over rows": (
        lambda s, x: ops.mean(tf.map_fn(lambda row: row**2 + ops.relu(ops.mean(x) - 9), x)),
        FULL,
    ),
    "loop over rows": (lambda s, x: ops.mean(tf.map_fn(lambda row: row**2, x)), MEAN),
    "entries until a place of the batch": (
        lambda s, x: ops.mean(x[:, : ops.argmax(ops.max(x, 0)) + 1]),
        FULL,
    ),
    "as many entries as rows": (
        lambda s, x: ops.mean(tf.slice(x, (0, 0), (-1, ops.minimum(4, ops.shape(x)[0])))),
        FULL,
    ),
    "split at a place of the batch": (
        lambda s, x: ops.mean(tf.split(x, [(n := ops.argmax(ops.max(x, 0))), 4 - n], 1)[0] ** 2),
        FULL,
    ),
    "split of weights at the number of rows": (
        lambda s, x: ops.mean(tf.split(s.router, [(n := ops.shape(x)[0]) // 2, 4 - n // 2])[0]),
        FULL,
    ),
    "weights of the first places": (
        lambda s, x: ops.mean(tf.convert_to_tensor(s.router)[: ops.shape(x)[0]]),
        FULL,
    ),
    "contrast": (lambda s, x: ops.mean(tf.image.adjust_contrast(x[..., None], 2.0)), FULL),
    "weights padded to the number of rows": (
        lambda s, x: ops.mean(
            tf.pad(tf.convert_to_tensor(s.router), [[0, ops.shape(x)[0]], [0, 0]])
        ),
        FULL,
    ),
    "entry of a mean at a place of the batch": (
        lambda s, x: (mean := ops.mean(x, 0))[ops.argmax(mean)],
        FULL,
    ),
    "list of as many entries as rows": (
        lambda s, x: ops.mean(
            tf.TensorArray(x.dtype, ops.shape(x)[0], element_shape=())
            .write(0, tf.ones((), x.dtype))
            .stack()
        ),
        FULL,
    ),
    "list of a fixed number of rows": (lambda s, x: ops.mean(_squares_in_list(x)), FULL),
    "draws seeded by the batch": (
        lambda s, x: ops.mean(
            x
            * tf.random.stateless_normal(
                (4,), ops.cast(ops.sum(x, 0)[:2] * 9, "int32"), dtype=x.dtype
            )
        ),
        FULL,
    ),
    "draws below a sum of the batch": (
        lambda s, x: ops.mean(
            x
            * ops.cast(
                keras.random.randint(ops.shape(x), 0, ops.cast(ops.sum(x**2), "int32") + 1, seed=1),
                x.dtype,
            )
        ),
        FULL,
    ),
    "weights in a shape of the batch": (
        lambda s, x: ops.mean(
            tf.reshape(s.b, tf.cond(ops.mean(x) > 9, lambda: [4, 2], lambda: [2, 4]))[0]
        ),
        FULL,
    ),
    "gated mean within a loop over rows": (
        lambda s, x: ops.mean(tf.map_fn(lambda row: row**2 * (1 + s.gate * ops.mean(x)), x)),
        FULL,
    ),
}

#: Outputs of a layer, and whether its rows are independent.
OUTPUTS: dict[str, tuple[Callable[..., Any], Any]] = {
    "ReZero of a centred batch": (lambda s, x: x + s.gate * (x - ops.mean(x, 0)), FULL),
    "LoRA of a mean": (lambda s, x: x + ops.mean(x, 0, keepdims=True) @ s.a @ s.b, FULL),
    "LoRA of rows": (lambda s, x: x + x @ s.a @ s.b, ROWS),
    "adaLN-Zero of a batch": (lambda s, x: x * (1 + s.gate * ops.max(x)), FULL),
    "adaLN-Zero of rows": (lambda s, x: x * (1 + s.gate * ops.max(x, -1, True)), ROWS),
    "gated neighbours": (lambda s, x: x + s.gate * ops.roll(x, 1, axis=0), FULL),
    "attention over rows": (
        lambda s, x: x + s.gate * (ops.softmax(x @ ops.transpose(x)) @ x),
        FULL,
    ),
    "branch that is not taken": (
        lambda s, x: tf.cond(ops.any(x > 99), lambda: ops.flip(x, 0), lambda: x),
        FULL,
    ),
    "choice that is not taken": (lambda s, x: ops.where(x > 99, ops.mean(x, 0), x), FULL),
    "clipped gradients": (lambda s, x: with_clipped_gradient(x), FULL),
    "reversed gradients": (lambda s, x: with_reversed_gradient(x) * 1.0, ROWS),
    "gradient of weights that is a sum": (_scaled(tf.reduce_sum), ROWS),
    "gradient of weights that is a mean": (_scaled(tf.reduce_mean), FULL),
    "number of rows": (lambda s, x: x * (1 + s.gate / num_rows(x)), FULL),
    "rows twice": (lambda s, x: ops.split(ops.tile(x, (2, 1)), 2)[0], FULL),
    "rows beside other rows": (lambda s, x: ops.concatenate([x, 1 + s.gate * x], 0)[::2], FULL),
    "loop over rows that subtracts their mean": (
        lambda s, x: x + s.gate * tf.map_fn(lambda row: row - ops.mean(x, 0), x),
        FULL,
    ),
    "loop over rows": (lambda s, x: tf.map_fn(lambda row: row * (1 + s.gate), x), ROWS),
    "loop over rows with one over entries": (
        lambda s, x: tf.map_fn(lambda row: tf.map_fn(lambda entry: entry * 2, row), x),
        ROWS,
    ),
    "loop over rows with a branch": (
        lambda s, x: tf.map_fn(lambda row: tf.cond(row[0] > 9, lambda: -row, lambda: row), x),
        ROWS,
    ),
    "loop over halves of rows": (
        lambda s, x: ops.reshape(
            tf.map_fn(lambda half: half - ops.mean(half), ops.reshape(x, (-1, 2))), (-1, 4)
        ),
        ROWS,
    ),
    "vectorized map over rows": (lambda s, x: tf.vectorized_map(lambda row: row * row, x), FULL),
    "vectorized map that subtracts the mean of rows": (
        lambda s, x: tf.vectorized_map(lambda row: row + s.gate * (row - ops.mean(x, 0)), x),
        FULL,
    ),
    "vectorized map over pairs": (
        lambda s, x: tf.vectorized_map(lambda row: row + s.gate * ops.sum(ops.abs(row - x)), x),
        FULL,
    ),
    "weights of the places of rows": (
        lambda s, x: (
            x * (1 + s.gate * ops.take(s.router * 2, ops.arange(ops.shape(x)[0]) % 4, 0)[:, :1])
        ),
        FULL,
    ),
    "loop over row numbers": (
        lambda s, x: tf.map_fn(
            lambda number: x[number], ops.arange(ops.shape(x)[0]), fn_output_signature=x.dtype
        ),
        FULL,
    ),
    "running sum": (lambda s, x: x + s.gate * tf.scan(lambda total, row: total + row, x), FULL),
    "every row beside the one before": (lambda s, x: x + s.gate * _beside_the_last(x), FULL),
    "steps of rows": (
        lambda s, x: ops.reshape(ops.reshape(x, (-1, 1)) * (1 + s.gate), (-1, 4)),
        ROWS,
    ),
}

#: Updates of a layer's state, and how they have to be reduced.
STATES: dict[str, tuple[Callable[..., Any], Any]] = {
    "moving mean": (lambda s, x: 0.9 * s.state + 0.1 * ops.mean(x), MEAN),
    "moving variance": (lambda s, x: 0.9 * s.state + 0.1 * s.gate * ops.var(x), FULL),
    "largest mean": (lambda s, x: ops.maximum(s.state, ops.mean(x)), FULL),
    "rows seen": (lambda s, x: s.state + num_rows(x), SUM),
    "gated sum": (lambda s, x: s.state + s.gate * ops.sum(x), SUM),
    "large entries": (lambda s, x: s.state + ops.sum(ops.cast(x > 99, x.dtype)), SUM),
    "batches with large entries": (lambda s, x: s.state + ops.cast(ops.any(x > 99), x.dtype), FULL),
    "decay of a sum": (lambda s, x: 0.9 * s.state + ops.sum(ops.relu(x - 9)), FULL),
}


def _model(function: Callable[..., Any]) -> keras.Model:
    with_keras_loss = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,), dtype="float64")
    hidden = layers.Dense(4, "tanh", dtype="float64")(inputs)
    outputs = layers.Dense(1, dtype="float64")(Adversary(function)(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(**with_keras_loss)
    return model


def _adding_loss(value: Callable[..., Any]) -> Callable[..., Any]:
    def call(layer: Adversary, x: Any) -> Any:
        layer.add_loss(value(layer, x))
        return x

    return call


def _updating_state(value: Callable[..., Any]) -> Callable[..., Any]:
    def call(layer: Adversary, x: Any) -> Any:
        layer.state.assign(value(layer, x))
        return x

    return call


CASES = {
    **{f"loss: {name}": (_adding_loss(f), expected) for name, (f, expected) in LOSSES.items()},
    **{f"output: {name}": case for name, case in OUTPUTS.items()},
    **{f"state: {name}": (_updating_state(f), expected) for name, (f, expected) in STATES.items()},
}


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def _inferred(name: str) -> Any:
    """Returns the inferred reduction of a case."""
    model = _model(CASES[name][0])
    batch = (tf.constant(X), tf.constant(Y))
    if Rows(model, lambda: batch).full_batch_reason(True) is not None:
        return FULL
    reductions = Rows(model, lambda: batch).reductions
    if name.startswith("loss"):
        return reductions.loss_reductions(1, training=True)[0]
    if name.startswith("state"):
        return reductions.state_reduction(model.layers[2].state)
    return ROWS


@pytest.mark.parametrize("name", CASES)
def test_initial_weights_do_not_mislead_reduction_inference(name: str) -> None:
    assert _inferred(name) == CASES[name][1]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["mirrored", "towers", "sharded parameters"])
@pytest.mark.parametrize("name", CASES)
def test_trains_as_on_one_device(name: str, strategy: str) -> None:
    def build() -> keras.Model:
        return _model(CASES[name][0])

    # Eagerly, because in a graph plain Keras gives "mean that is zero" other numbers in about one
    # of ten runs on a busy machine.
    plain = build()
    plain.run_eagerly = True
    trained = []
    for runner in (plain, tfdist.Trainer(build, strategy=create_strategy(strategy, 2))):
        runner.fit(
            np.tile(X, (3, 1)) * [[1, 2, -1, 3]], np.tile(Y, (3, 1)), batch_size=5, epochs=2,
            shuffle=False, verbose=0,
        )  # fmt: skip
        model = getattr(runner, "model", runner)
        trained.append([keras.ops.convert_to_numpy(v) for v in model.variables])
    for expected, found in zip(*trained, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
