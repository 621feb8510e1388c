"""Splitting a global batch loses no row."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies import shares


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 9])
@pytest.mark.parametrize("num_shares", [1, 2, 3])
def test_shares_hold_each_row_once_in_order(rows: int, num_shares: int) -> None:
    batch = ({"a": tf.range(rows), "b": None}, tf.reshape(tf.range(2 * rows), [rows, 2]))
    parts = shares.split(batch, num_shares, range(num_shares))
    assert len(parts) == num_shares
    np.testing.assert_array_equal(np.concatenate([part[0]["a"] for part in parts]), np.arange(rows))
    sizes = [len(part[1]) for part in parts]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
