"""Splitting a global batch into the shares of the replicas."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

Batch = Any  # nested tuples, lists and dicts of tensors with rows along axis 0


def num_rows(batch: Batch) -> tf.Tensor:
    """Returns the number of rows of a batch, an int32 scalar."""
    first = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    return tf.shape(first)[0]


def split(batch: Batch, num_shares: int) -> tuple[Batch, ...]:
    """Splits a batch into consecutive shares whose sizes differ by one row at most.

    A batch of fewer rows than shares leaves some shares without rows. In order, so that what the
    replicas return can be laid end to end.
    """
    if num_shares == 1:
        return (batch,)
    rows = num_rows(batch)
    cuts = [rows * i // num_shares for i in range(num_shares + 1)]
    return tuple(take(batch, cuts[i], cuts[i + 1]) for i in range(num_shares))


def take(batch: Batch, begin: tf.Tensor, end: tf.Tensor) -> Batch:
    """Returns the rows from `begin` up to `end` of each tensor of a batch."""

    def rows_of(tensor: Any) -> Any:
        if tensor is None:
            return None
        if isinstance(tensor, tf.SparseTensor):
            size = tf.cast(end - begin, tf.int64)
            start = tf.one_hot(0, tensor.shape.rank, tf.cast(begin, tf.int64), dtype=tf.int64)
            shape = tf.concat([[size], tensor.dense_shape[1:]], 0)
            return tf.sparse.slice(tensor, start, shape)
        return tensor[begin:end]

    return tf.nest.map_structure(rows_of, batch)


def without_optionals(batch: Batch) -> Batch:
    """Turns the empty Optionals that Keras's generator adapter yields back into None."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch
    )
