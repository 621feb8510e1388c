"""The row analysis follows rows that loops read one by one.

It proves what is computed row by row, and proves nothing of what only looks like that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.rows.analysis import RowAnalysis
from tfdist.rows.dependence import Dependence, Kind, rows


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
