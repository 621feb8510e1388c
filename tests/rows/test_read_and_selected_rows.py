"""The row analysis follows rows that loops read one by one, and rows that are selected.

It proves what is computed row by row, and proves nothing of what only looks like that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tfdist.rows.analysis import RowAnalysis
from tfdist.rows.dependence import Dependence, Kind, rows

ONES = np.ones((1, 4), "float32")


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


def chosen(then: Callable[[Any], Any], otherwise: Callable[[Any], Any], x: Any, bound: Any) -> Any:
    """A map over rows with a branch for each."""

    def choose(row: Any) -> Any:
        return tf.cond(tf.reduce_sum(row) > bound, lambda: then(row), lambda: otherwise(row))

    return tf.vectorized_map(choose, x)


def stitched(x: Any, *order: int) -> Any:
    """Rows with and without a positive first number, put together in an order."""
    number = tf.shape(x)[0]
    numbers = tf.cast(x[:, 0] > 0, tf.int32)
    places = tf.dynamic_partition(tf.range(number), numbers, 2)
    return tf.dynamic_stitch(places, [tf.gather(x, places[i]) for i in order])


def with_entries(x: Any, compute: Callable[[Any, Any], Any]) -> Any:
    """Rows with and without a positive first number, put together with other entries instead.

    Args:
        x: The rows.
        compute: Returns the entries for the rows at some places, and the places of both kinds.
    """
    numbers = tf.cast(x[:, 0] > 0, tf.int32)
    both = tf.dynamic_partition(tf.range(tf.shape(x)[0]), numbers, 2)
    return tf.dynamic_stitch(both, [compute(both[0], both), tf.gather(x, both[1])])


def of_length(length: Any, *, entry: Any = ONES) -> Any:
    return tf.tile(entry, tf.stack([length, 1]))


def places(x: Any) -> Any:
    return tf.squeeze(tf.where(x[:, 0] > 0), 1)


#: Functions of rows with 4 entries that are row by row.
ROW_BY_ROW = {
    "read row": lambda x: read(x, lambda i: i),
    "branches": lambda x: chosen(tf.tanh, lambda row: -row, x, 0.0),
    "branches with reductions": lambda x: chosen(tf.reduce_max, tf.reduce_mean, x, 1.0),
    "branch with a constant": lambda x: chosen(tf.tanh, lambda row: ONES[0], x, 0.0),
    "branches with constants": lambda x: chosen(
        lambda row: tf.constant(1.0), lambda row: tf.constant(2.0), x, 0.0
    ),
    "branch with a row beside its own reductions": lambda x: chosen(
        lambda row: (row - tf.reduce_mean(row)) / tf.math.reduce_std(row), tf.abs, x, 0.0
    ),
    "branches of three kinds": lambda x: tf.vectorized_map(
        lambda row: tf.switch_case(
            tf.cast(row[0] > 0, tf.int32) + tf.cast(row[1] > 0, tf.int32),
            [lambda: ONES[0], lambda: row / tf.reduce_sum(row), lambda: -row],
        ),
        x,
    ),
    "constant branch of a condition of weights": lambda x: tf.vectorized_map(
        lambda row: tf.cond(tf.constant(ONES)[0, 0] > 0, lambda: ONES[0], lambda: row), x
    ),
    "rows put together": lambda x: stitched(x, 0, 1),
    "rows put together with constants": lambda x: with_entries(
        x, lambda own, _: of_length(tf.size(own))
    ),
}
#: Functions that are not.
MIXING = {
    "read row before": lambda x: read(x, lambda i: tf.maximum(i - 1, 0)),
    "read rows from the end": lambda x: read(x, lambda i: tf.shape(x)[0] - 1 - i),
    "read row of a half": lambda x: read(x, lambda i: i // 2),
    "read row of rows beside each other": lambda x: read(tf.concat([x, x], 0), lambda i: i),
    "read part of a row": lambda x: read(
        x, lambda i: i, slice(tf.cast(tf.reduce_max(x), tf.int32), None)
    ),
    "read row twice as often": lambda x: tf.gather(read(tf.repeat(x, 2, 0), lambda i: i), [0, 1]),
    "branch with the mean of a batch": lambda x: chosen(
        tf.tanh, lambda row: row - tf.reduce_mean(x), x, 0.0
    ),
    "bound that is the mean of a batch": lambda x: chosen(tf.tanh, tf.abs, x, tf.reduce_mean(x)),
    "branch with all rows": lambda x: chosen(
        tf.tanh, lambda row: tf.reduce_sum(row * x, 0), x, 0.0
    ),
    "rows put together in another order": lambda x: stitched(x, 1, 0),
    "rows put together twice": lambda x: stitched(x, 0, 0),
    "branch with the mean of a batch alone": lambda x: chosen(
        tf.tanh, lambda row: tf.reduce_mean(x, 0), x, 0.0
    ),
    "branch with the number of rows": lambda x: chosen(
        tf.tanh, lambda row: tf.fill([4], tf.cast(tf.shape(x)[0], tf.float32)), x, 0.0
    ),
    "as many constants as other rows": lambda x: with_entries(
        x, lambda own, both: of_length(tf.size(both[1]))
    ),
    "as many constants as twice the rows": lambda x: with_entries(
        x, lambda own, _: of_length(2 * tf.size(own))
    ),
    "number of the rows that take a branch": lambda x: with_entries(
        x, lambda own, _: of_length(tf.size(own)) * tf.cast(tf.size(own), tf.float32)
    ),
    "constants for each of two rows": lambda x: with_entries(
        x, lambda own, _: of_length(tf.size(own), entry=tf.repeat(ONES, 2, 0))
    ),
    "numbers of entries beside each other": lambda x: with_entries(
        x, lambda own, _: tf.tile(ONES[:, :1], tf.stack([1, tf.size(own)]))
    ),
    "rows of a branch minus their mean": lambda x: with_entries(
        x, lambda own, _: (rows := tf.gather(x, own)) - tf.reduce_mean(rows, 0, keepdims=True)
    ),
    "weights for a fixed number of rows of a branch": lambda x: with_entries(
        x, lambda own, _: tf.gather(x, own) * tf.random.stateless_normal([3, 4], [1, 2])
    ),
    "choice for a fixed number of rows of a branch": lambda x: with_entries(
        x, lambda own, _: tf.where(np.eye(3, 4) > 0, tf.gather(x, own), ONES)
    ),
    "labels of a fixed number of rows": lambda x: tf.raw_ops.SoftmaxCrossEntropyWithLogits(
        features=x, labels=np.eye(3, 4, dtype="float32")
    )[0],
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_rows_that_are_read_and_put_together_are_row_by_row(name: str) -> None:
    assert class_of(ROW_BY_ROW[name], 4) == rows()


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_are_mixed_are_not_row_by_row(name: str) -> None:
    assert class_of(MIXING[name], 4).kind in (Kind.MIXED, Kind.UNKNOWN)


@pytest.mark.parametrize(("length", "is_rows"), [(4, True), (2, True), (8, False)])
def test_entries_of_unknown_length_are_regrouped_within_a_row(length: int, is_rows: bool) -> None:
    """8 numbers may belong to two rows if a row has any number of 4."""
    found = class_of(lambda x: tf.reshape(x, [-1, length]), None, 4)
    assert found.kind is (Kind.ROWS if is_rows else Kind.UNKNOWN)


@pytest.mark.parametrize("method", ["bilinear", "nearest"])
def test_images_that_a_map_resizes_are_row_by_row(method: str) -> None:
    found = class_of(
        lambda x: ops.vectorized_map(lambda row: tf.image.resize(row, [3, 2], method), x), 4, 4, 1
    )
    assert found == rows()


@tf.function(autograph=False)
def selected_by(x: Any, numbers: Any) -> Any:
    return tf.gather(x, tf.squeeze(tf.where(numbers > 0), 1))


#: Sums over selected rows, and whether they are sums over the rows of a batch.
SELECTED = {
    "selected rows": (lambda x: tf.gather(x, places(x)), True),
    "rows at the doubled places": (lambda x: tf.gather(x, places(x) * 2 % 4), False),
    "places": (lambda x: tf.cast(places(x), tf.float32), False),
    "rows at selected numbers": (
        lambda x: tf.gather(x, tf.cast(tf.boolean_mask(x[:, 1], x[:, 0] > 0), tf.int32) % 4),
        False,
    ),
    "pairs of two selections": (lambda x: selected_by(x, x[:, 0]) * selected_by(x, x[:, 1]), False),
    "rows of which there are two": (lambda x: tf.gather(tf.repeat(x, 2, 0), places(x)), False),
    "rows minus their own means": (
        lambda x: (kept := tf.gather(x, places(x))) - tf.reduce_mean(kept, 1, keepdims=True),
        True,
    ),
    "largest in groups of as many as there are rows": (
        lambda x: tf.reduce_max(tf.reshape(tf.gather(x, places(x)), [-1, tf.shape(x)[0]]), 1),
        False,
    ),
    "largest in groups of several rows": (
        lambda x: tf.reduce_max(tf.reshape(tf.gather(x, places(x)), [-1, 8]), 1),
        False,
    ),
    "weights for a fixed number of rows": (
        lambda x: tf.gather(x, places(x)) * tf.reshape(tf.range(12.0), [3, 4]),
        False,
    ),
    "choices for a fixed number of rows": (
        lambda x: tf.where(np.eye(3, 4) > 0, tf.gather(x, places(x)), 0.0),
        False,
    ),
    "all pairs": (
        lambda x: tf.tanh(
            tf.expand_dims(tf.gather(x, places(x)), 0) - tf.expand_dims(tf.gather(x, places(x)), 1)
        ),
        False,
    ),
    "as many constants as rows": (lambda x: of_length(tf.size(places(x))), True),
    "rows times their number": (
        lambda x: tf.gather(x, places(x)) * tf.cast(tf.size(places(x)), tf.float32),
        False,
    ),
}


@pytest.mark.parametrize("name", SELECTED)
def test_sums_over_selected_rows(name: str) -> None:
    function, is_sum = SELECTED[name]
    assert class_of(lambda x: tf.reduce_sum(function(x), 0), 4).is_sum == is_sum
