"""Rows that stand in where a share has none: user code computes them, and nothing counts them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.strategies.row_counts import has_rows, num_rows
from tfdist.strategies.shares import Batch, take


def counted(structure: Any, share_rows: tf.Tensor) -> Any:
    """Returns what was computed from a share, without rows where the only one stands in.

    Args:
        structure: Of tensors with the share's rows along axis 0; others are left as they are.
        share_rows: Rows of the share that count, int32 scalar.
    """

    def rows_of(tensor: Any) -> Any:
        if not has_rows(tensor):
            return tensor
        return take(tensor, tf.constant(0), tf.where(share_rows > 0, num_rows(tensor), 0))

    return tf.nest.map_structure(rows_of, structure)


def with_a_row(batch: Batch) -> Batch:
    """Returns a batch as it is, or, where it has no rows, one row of zeros and empty strings."""
    rows = tf.maximum(num_rows(batch), 1)

    def filled(tensor: Any) -> Any:
        if not has_rows(tensor):
            return tensor
        if isinstance(tensor, tf.SparseTensor):
            shape = tf.concat([[tf.cast(rows, tf.int64)], tensor.dense_shape[1:]], 0)
            return tf.SparseTensor(tensor.indices, tensor.values, shape)
        if isinstance(tensor, tf.RaggedTensor):
            nothing = tf.zeros([1], tensor.row_splits.dtype)
            row = tf.RaggedTensor.from_row_lengths(tensor.values[:0], nothing)
        else:
            row = tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], 0), tensor.dtype)
        return tf.concat([tensor, row], 0)[:rows]

    return tf.nest.map_structure(filled, batch)
