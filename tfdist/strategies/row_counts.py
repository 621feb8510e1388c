"""How many rows the parts of a batch have."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

_UNEVEN = "the parts of a batch have different numbers of rows:"


def num_rows(batch: Any) -> tf.Tensor:
    """Returns the number of rows of a batch, an int32 scalar: of the first tensor with any."""
    return _rows_of(next(leaf for leaf in tf.nest.flatten(batch) if has_rows(leaf)))


def has_rows(leaf: Any) -> bool:
    """Tells whether a leaf of a batch is a tensor that has a first axis."""
    return leaf is not None and leaf.shape.rank != 0


def uneven(batch: Any) -> str | None:
    """Says how many rows the parts of a batch have, if not all as many; called eagerly."""
    sizes = {name: int(rows) for name, rows in _sizes(batch)}
    if len(set(sizes.values())) < 2:
        return None
    return _UNEVEN + ",".join(f" {name} has {rows}" for name, rows in sizes.items())


def assert_even(batch: Any) -> None:
    """Lets a batch fail that cannot be cut alike; called in a graph."""
    sizes = _sizes(batch)
    rows = tf.stack([rows for _, rows in sizes])
    names = tf.constant([f" {name} has " for name, _ in sizes])
    said = tf.strings.reduce_join(names + tf.strings.as_string(rows), separator=",")
    cure = ", so it cannot be cut into shares: give all as many, or use the strategy one_device"
    tf.debugging.Assert(tf.reduce_all(rows == rows[0]), [_UNEVEN + said + cure])


def _sizes(batch: Any) -> list[tuple[str, tf.Tensor]]:
    """The rows of the parts of a batch that have any, by what their places are called."""
    leaves = keras.tree.flatten_with_path(batch)
    return [("/".join(map(str, path)), _rows_of(leaf)) for path, leaf in leaves if has_rows(leaf)]


def _rows_of(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]
