"""Rows that depend on each other are detected, and rows that loops read one by one are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdist
from tfdist.loops.model_methods import write_on_chief_only
from tfdist.rows import Rows
from tfdist.rows.analysis import RowAnalysis
from tfdist.rows.dependence import Dependence, Kind, rows
from tfdist.rows.keras_layers import has_only_row_by_row_layers

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")


class Applied(layers.Layer):
    """A custom layer that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(name="applied")
        self.function, self.seed = function, keras.random.SeedGenerator(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.function(inputs, training, self.seed)


def model_with(function: Callable[..., Any]) -> keras.Model:
    hidden = [layers.Dense(4), Applied(function), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((4,)), *hidden, layers.Dropout(0.5), layers.Dense(2)])


def reason(model: keras.Model, training: bool, x: Any = X) -> str | None:
    return Rows(model, lambda: (tf.nest.map_structure(tf.constant, x),)).full_batch_reason(training)


DEPENDENT = {
    "mean": lambda x, *_: x - ops.mean(x, axis=0),
    "largest of a batch": lambda x, *_: x / ops.max(ops.abs(x)),
    "number of rows": lambda x, *_: x / ops.cast(ops.shape(x)[0], "float32"),
    "order": lambda x, *_: ops.roll(x, 1, axis=0),
    "only in training": lambda x, training, _: x - ops.mean(x, 0) if training else x,
}
INDEPENDENT = {
    "row": lambda x, *_: ops.softmax(x) * 2,
    "order in each row": lambda x, *_: ops.take_along_axis(x, ops.argsort(x, axis=1), axis=1),
    "place of the largest": lambda x, *_: x * ops.cast(ops.argmax(x, 1), x.dtype)[:, None],
    "einsum": lambda x, *_: ops.einsum("...i,ij->...j", x, np.eye(4)),
    "einsum with an axis of length 1 before": lambda x, *_: ops.sum(
        ops.einsum("...i,...i->...i", x, np.ones((3, 1, 4), "float32")), 0
    ),
    "map of two inputs": lambda x, *_: ops.map(
        lambda rows: rows["a"] * rows["b"], {"a": x, "b": ops.tanh(x)}
    ),
    "sizes of all axes": lambda x, *_: ops.reshape(ops.reshape(x, (-1,)), tf.unstack(tf.shape(x))),
    "token for each row": lambda x, *_: ops.concatenate(
        [ops.repeat(ops.ones((1, 2)), ops.shape(x)[0], axis=0), x], -1
    )[:, :4],
    "noise": lambda x, _, seed: x + keras.random.normal(ops.shape(x), seed=seed),
    "noise without a seed": lambda x, *_: x + keras.random.normal(ops.shape(x)),
    "noise of TensorFlow": lambda x, *_: x + tf.random.normal(tf.shape(x)),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_names_the_layer_that_mixes_rows(name: str) -> None:
    model = model_with(DEPENDENT[name])
    assert reason(model, training=True) == "Applied 'applied' mixes the rows of a batch"
    in_inference = reason(model, training=False)
    assert (in_inference is None) == (name == "only in training")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_row_by_row_models_are_not_reported(name: str, training: bool) -> None:
    assert reason(model_with(INDEPENDENT[name]), training) is None


def test_all_ranks_decide_alike() -> None:
    """Although other ranks than 0 have a model whose methods do not write files."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    write_on_chief_only(model, Mock(group=Mock(is_chief=False, rank=1)))
    assert has_only_row_by_row_layers(model)


def test_keras_layers_are_not_traced() -> None:
    def never() -> Any:
        raise AssertionError("the data were read")

    hidden = [layers.Dense(4, activation="relu"), layers.BatchNormalization(), layers.Softmax()]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dropout(0.5)])
    assert Rows(model, never).full_batch_reason(training=True) is None
    over_rows = keras.Sequential([keras.Input((4,)), layers.Softmax(axis=0)])
    assert "Softmax" in str(reason(over_rows, training=True))


@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ((4,), layers.Softmax(axis=-2)),
        ((4,), layers.UnitNormalization(axis=-2)),
        ((), layers.Activation("softmax")),
    ],
)
def test_keras_layers_over_an_axis_of_rows_are_reported(
    shape: tuple[int, ...], layer: layers.Layer
) -> None:
    inputs = keras.Input(shape)
    found = reason(keras.Model(inputs, layer(inputs)), True, X[:, 0] if shape == () else X)
    assert found is not None


def test_attention_over_rows_is_reported() -> None:
    inputs = keras.Input((4,))
    attention = layers.MultiHeadAttention(2, 4, attention_axes=(0,))
    assert reason(keras.Model(inputs, attention(inputs, inputs)), True) is not None


def test_softmax_over_a_middle_axis_is_row_by_row() -> None:
    """TensorFlow computes the order of the axes in the graph, from constants."""

    def attend(x: tf.Tensor, *_: Any) -> tf.Tensor:
        scores = ops.softmax(ops.reshape(x, (-1, 2, 2)), axis=1)
        return ops.reshape(scores, (-1, 4))

    assert reason(model_with(attend), training=True) is None


def test_outputs_with_another_number_of_rows_are_reported() -> None:
    row = keras.Input((4,))
    pairs = keras.Model(row, ops.matmul(row, ops.transpose(row)), name="pairs")
    assert reason(pairs, training=True) == "Functional 'pairs' mixes the rows of a batch"
    fixed = keras.Model(row, ops.reshape(row, (6, 4)), name="fixed")
    assert reason(fixed, training=True) == "Functional 'fixed' mixes the rows of a batch"


@pytest.mark.parametrize(("shape", "mixes"), [((), True), ((2,), False)])
def test_numbers_that_make_one_sample_are_reported(shape: tuple[int, ...], mixes: bool) -> None:
    """CategoryEncoding takes a batch of single numbers for one sample."""
    numbers = keras.Input(shape, dtype="int32")
    model = keras.Model(numbers, layers.CategoryEncoding(4, "multi_hot")(numbers))
    x = np.arange(6 * (2 if shape else 1)).reshape(6, *shape) % 4
    assert (reason(model, training=True, x=x) is not None) == mixes


def test_inputs_with_different_numbers_of_rows_are_reported() -> None:
    one, other = keras.Input((4,)), keras.Input((4,))
    model = keras.Model([one, other], ops.sum(one) + ops.sum(other))
    found = reason(model, training=True, x=(X, X[:3]))
    assert found == "the parts of a batch have different numbers of rows: 0/0 has 6, 0/1 has 3"


class MovingSquare(layers.Layer):
    """Keeps a moving mean of the squares of its inputs, also in evaluation and prediction."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.mean.assign(0.9 * self.mean + ops.mean(inputs**2))
        return inputs


def test_prediction_updates_states_as_on_one_device() -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), MovingSquare(), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    plain, trainer = build(), tfdist.Trainer(build, strategy="mirrored", devices=2)
    for model in (plain, trainer):
        model.predict(X[:5], batch_size=3, verbose=0)
        model.evaluate(X[:5], X[:5, :1], batch_size=3, verbose=0)
        model.predict(X[:5], batch_size=3, verbose=0)
    state = float(plain.layers[0].mean.numpy())
    assert float(trainer.model.layers[0].mean.numpy()) == pytest.approx(state, rel=1e-6)


def class_of(function: Callable[[Any], Any], *shape: int) -> Dependence:
    """Returns the class of a function of rows with a shape."""
    spec = tf.TensorSpec((None, *shape))
    graph = tf.function(function, autograph=False).get_concrete_function(spec).graph
    return RowAnalysis([(graph.inputs[0], rows())]).of(graph.outputs[0])


def read(table: Any, place: Callable[[Any], Any], entry: Any = ...) -> Any:
    """A loop with one round for each row, which reads an entry of a table in each round."""
    number = tf.shape(table)[0]

    def add(i: Any, found: Any) -> Any:
        return i + 1, found.write(i, tf.tanh(table[place(i), entry]))

    found = tf.TensorArray(tf.float32, number, element_shape=None)
    return tf.while_loop(lambda i, _: i < number, add, (0, found))[1].stack()


#: Functions of rows with 4 entries that are not row by row.
MIXING = {
    "read row before": lambda x: read(x, lambda i: tf.maximum(i - 1, 0)),
    "read rows from the end": lambda x: read(x, lambda i: tf.shape(x)[0] - 1 - i),
    "read row of a half": lambda x: read(x, lambda i: i // 2),
    "read row of rows beside each other": lambda x: read(tf.concat([x, x], 0), lambda i: i),
    "read part of a row": lambda x: read(
        x, lambda i: i, slice(tf.cast(tf.reduce_max(x), tf.int32), None)
    ),
    "read row twice as often": lambda x: tf.gather(read(tf.repeat(x, 2, 0), lambda i: i), [0, 1]),
    "labels of a fixed number of rows": lambda x: tf.raw_ops.SoftmaxCrossEntropyWithLogits(
        features=x, labels=np.eye(3, 4, dtype="float32")
    )[0],
}


def test_rows_that_are_read_in_their_order_are_row_by_row() -> None:
    assert class_of(lambda x: read(x, lambda i: i), 4) == rows()


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_are_mixed_are_not_row_by_row(name: str) -> None:
    assert class_of(MIXING[name], 4).kind in (Kind.MIXED, Kind.UNKNOWN)


@pytest.mark.parametrize(("length", "is_rows"), [(4, True), (2, True), (8, False)])
def test_entries_of_unknown_length_are_regrouped_within_a_row(length: int, is_rows: bool) -> None:
    """8 numbers may belong to two rows if a row has any number of 4."""
    found = class_of(lambda x: tf.reshape(x, [-1, length]), None, 4)
    assert found.kind is (Kind.ROWS if is_rows else Kind.UNKNOWN)
