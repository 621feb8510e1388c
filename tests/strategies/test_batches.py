"""Splitting a global batch loses no row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies import batches
from tfdist.strategies.batches import drop_padding, num_rows, pad_to_one_row


@pytest.mark.parametrize("rows", [1, 2, 7, 9])
@pytest.mark.parametrize("num_shares", [1, 2, 3])
def test_shares_hold_each_row_once_in_order(rows: int, num_shares: int) -> None:
    batch = ({"a": tf.range(rows), "b": None}, tf.reshape(tf.range(2 * rows), [rows, 2]))
    parts = batches.split(batch, num_shares, range(num_shares))
    assert len(parts) == num_shares
    own = [drop_padding(part.rows, part.num_rows) for part in parts]
    np.testing.assert_array_equal(np.concatenate([each[0]["a"] for each in own]), np.arange(rows))
    sizes = [len(each[1]) for each in own]
    assert sizes == [int(part.num_rows) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_a_share_without_rows_has_one_of_another_that_stands_in() -> None:
    first, second = batches.split(tf.constant([[7.0]]), 2, range(2))
    assert (int(first.num_rows), int(second.num_rows)) == (0, 1)
    np.testing.assert_array_equal(first.rows, [[7.0]])


RAGGED = tf.ragged.constant([[[1, 2]], [[3], []]], ragged_rank=2)


@pytest.mark.parametrize(
    "batch",
    [
        tf.ones((2, 3)),
        tf.constant(["a", "b"]),
        RAGGED,
        tf.sparse.from_dense(tf.ones((2, 3))),
        {"a": tf.ones((2,)), "b": None},
    ],
    ids=["dense", "strings", "ragged", "sparse", "nested"],
)
def test_only_a_batch_without_rows_is_given_one(batch: Any) -> None:
    assert int(num_rows(pad_to_one_row(batch))) == 2
    nothing = batches.take(batch, tf.constant(0), tf.constant(0))
    filled = pad_to_one_row(nothing)
    assert int(num_rows(filled)) == 1
    assert int(num_rows(drop_padding(filled, tf.constant(0)))) == 0
    tf.nest.assert_same_structure(batch, filled)
