"""Whether all rows look up the same entries of an embedding table follows from the traced model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.programs.engines import assert_equals_one_device
from tests.programs.program import unregistered
from tests.support.case import compiled
from tests.support.data import tokens
from tfdist.errors import UnsupportedModelError
from tfdist.rows.lookups import Lookups
from tfdist.step.state import copied
from tfdist.upstream.tensorflow_graphs import constant_value

DATA = tokens()

#: Maps tokens [rows, 5] to the entries that are looked up in a table of 8.
Indices = Callable[[Any], Any]


class Table(layers.Layer):
    """Returns the mean of the looked-up entries of each row."""

    def __init__(self, *indices: Indices) -> None:
        super().__init__()
        self.indices, self.table = indices, layers.Embedding(8, 2)

    def build(self, shape: Any) -> None:
        self.table.build()

    def call(self, inputs: Any) -> Any:
        looked_up = [ops.mean(self.table(indices(inputs)), axis=-2) for indices in self.indices]
        return ops.cast(inputs, "float32") + ops.sum(sum(looked_up), axis=-1, keepdims=True)


def lookups(*indices: Indices, rows: int = 8) -> Lookups:
    inputs = keras.Input((5,), dtype="int32")
    model = compiled(keras.Model(inputs, layers.Dense(1)(Table(*indices)(inputs))))
    return Lookups(model, lambda: (tf.constant(DATA.x[:rows]), tf.constant(DATA.y[:rows])))


def positions(tokens: Any) -> Any:
    return ops.arange(ops.shape(tokens)[1])


def pairs(tokens: Any) -> Any:
    """Returns entries by the distance of two positions, with repetitions."""
    return ops.reshape(ops.abs(positions(tokens)[:, None] - positions(tokens)), [-1])


def identity(tokens: Any) -> Any:
    return tokens


def largest(tokens: Any) -> Any:
    return ops.max(tokens, axis=0)


@pytest.mark.parametrize(
    ("indices", "alike"),
    [
        ([positions], True),
        ([pairs, positions], True),
        ([identity], False),
        ([identity, lambda tokens: tokens[:, ::-1]], False),
        ([lambda tokens: ops.broadcast_to(positions(tokens), ops.shape(tokens))], False),
    ],
)
def test_classifies_lookups(indices: list[Indices], alike: bool) -> None:
    assert lookups(*indices).are_alike(0) == alike


@pytest.mark.parametrize("indices", [[identity, positions], [largest]])
def test_mixed_lookups_need_full_batches(indices: list[Indices]) -> None:
    result = lookups(*indices)
    assert "embeddings' depend on the rows" in (result.full_batch_reason() or "")
    with pytest.raises(UnsupportedModelError, match="Use one embedding for each kind of lookup"):
        result.are_alike(0)


class Retrieval(keras.Model):
    """Scores all candidates of the batch for each query, in `compute_loss`."""

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self.queries = layers.Embedding(8, 2)
        self.candidates = self.queries if is_shared else layers.Embedding(8, 2)

    def build(self, shape: Any) -> None:
        self.queries.build()
        self.candidates.build()

    def call(self, inputs: Any) -> Any:
        return ops.mean(self.queries(inputs), axis=1)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any) -> Any:
        logits = ops.matmul(y_pred, ops.transpose(self.candidates(ops.cast(y[:, 0], "int32"))))
        labels = ops.eye(ops.shape(y)[0], dtype=logits.dtype)
        return ops.mean(keras.losses.categorical_crossentropy(labels, logits, from_logits=True))


class WithSparse(keras.Model):
    """Multiplies a sparse input by a matrix, and looks up integers that are all different."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.dense = layers.Embedding(20, 2), layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.table(inputs["ids"]) + self.dense(inputs["sparse"])


def test_sparse_inputs_do_not_hide_lookups_of_rows() -> None:
    sparse = tf.sparse.from_dense(tf.eye(8, 30))
    x = {"ids": tf.range(8), "sparse": sparse}
    model = WithSparse()
    model(x)
    result = Lookups(model, lambda: (x, tf.zeros([8, 2])))
    assert [result.are_alike(place) for place in range(2)] == [False, False]
    slices = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([1, 4, 1]), tf.constant([20, 2]))
    of_batch = result.of_batch({0: slices, 1: slices})
    assert [len(of_batch[place].indices) for place in range(2)] == [3, 2]


@pytest.mark.parametrize("is_shared", [False, True])
def test_lookups_of_compute_loss_train_as_on_one_device(is_shared: bool) -> None:
    """One device has a slice for each lookup, which Adam distinguishes from their sum."""

    def build() -> keras.Model:
        return compiled(Retrieval(is_shared), keras.optimizers.Adam(0.1, epsilon=1e-2), loss=None)

    assert_equals_one_device(unregistered(build, DATA, epochs=1), eagerly=True)


def test_constant_rows_of_the_full_batch_are_sent_when_the_step_runs() -> None:
    """TensorFlow would gather constants while it optimizes the graph, on one of the ranks only."""

    def sent(num_rows: tf.Tensor) -> tf.Tensor:
        slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 1]), tf.constant([4, 3]))
        return copied(slices, zero=tf.minimum(num_rows, 0)).indices

    function = tf.function(sent, autograph=False)
    graph = function.get_concrete_function(tf.TensorSpec([], tf.int32)).graph
    assert constant_value(graph.outputs[0]) is None
    assert function(tf.constant(5)).numpy().tolist() == [0, 1]
