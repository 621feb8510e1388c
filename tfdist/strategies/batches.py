"""Splits global batches into per-replica batches, and pads those that would have no rows.

A batch is any nested structure of tensors with rows along axis 0. A leaf of rank 0, or None, has no
rows and is the same for every replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

Batch = Any  # nested tuples, lists and dicts of tensors with rows along axis 0

_UNEVEN = "the parts of a batch have different numbers of rows:"
_CHECKSUM_PRIME = 2_147_483_647
#: Elements of a sample are up to this far apart; a prime, so that they are in all columns.
_MAX_STRIDE = 61
#: Inputs of fewer elements are hashed in full.
_MIN_SAMPLE = 1024

#: What workers compare of the global batches that they read: see `checksum`.
CheckData = Literal["full", "sampled", "off"]


#: Workers that bring their own rows count them from `rank * OWN_ROWS_APART` on: none knows how
#: many the others bring, and rows that are far apart do not share random numbers.
OWN_ROWS_APART = 2**32


class Share(NamedTuple):
    """A per-replica batch: the rows of a global batch that one replica computes.

    It always has at least one row, because TensorFlow's convolutions and poolings fail or abort on
    empty tensors. Where a replica gets no row of the batch, `rows` holds one row of padding, which
    no loss, metric or gradient counts.
    """

    num_rows: Any  # rows that count, an int32 scalar; may be 0
    rows: Batch  # as many rows, or one row of padding
    first_row: Any = 0  # position of the first row in the global batch, an int64 scalar


class Element(NamedTuple):
    """One global batch as a process receives it."""

    num_rows: Any  # of the global batch; int32 scalar
    checksum: Any  # of the global batch, to detect workers that read different data; int64 scalar
    shares: Sequence[Share]  # one for each replica of this process


# ---- splitting ----


def split(
    batch: Batch, num_shares: int, selected: Sequence[int], rows: tf.Tensor | None = None
) -> tuple[Share, ...]:
    """Splits a batch into consecutive per-replica batches whose sizes differ by at most one row.

    The order is kept, so that the replicas' outputs can be concatenated. If the batch has fewer
    rows than there are replicas, some replicas get a row of padding only.

    Args:
        batch: The batch to split.
        num_shares: The number of per-replica batches.
        selected: The indices of those to return.
        rows: How many rows of the batch count; None: all of them.
    """
    rows = num_rows(batch) if rows is None else rows
    if num_shares == 1:
        return (Share(rows, batch),)
    assert_even(batch)
    # A leading size that is not static marks a tensor of rows: `step.random` needs to know, and
    # replicas whose sizes differ share one trace.
    rows = tf.compat.v1.placeholder_with_default(rows, [])
    bounds = [(rows * i // num_shares, rows * (i + 1) // num_shares) for i in selected]
    return tuple(share(batch, begin, end) for begin, end in bounds)


def share(batch: Batch, begin: tf.Tensor, end: tf.Tensor) -> Share:
    """Returns rows `begin` to `end` of a batch; if there are none, the next row is the padding."""
    rows = take(batch, begin, tf.maximum(end, begin + 1))
    return Share(end - begin, rows, tf.cast(begin, tf.int64))


def take(batch: Batch, begin: tf.Tensor, end: tf.Tensor) -> Batch:
    """Returns rows `begin` to `end` of each tensor of a batch."""

    def rows_of(tensor: Any) -> Any:
        if not has_rows(tensor):
            return tensor
        if isinstance(tensor, tf.SparseTensor):
            size = tf.cast(end - begin, tf.int64)
            start = tf.one_hot(0, tensor.shape.rank, tf.cast(begin, tf.int64), dtype=tf.int64)
            shape = tf.concat([[size], tensor.dense_shape[1:]], 0)
            return tf.sparse.slice(tensor, start, shape)
        return tensor[begin:end]

    return tf.nest.map_structure(rows_of, batch)


# ---- padding ----


def drop_padding(structure: Any, share_rows: tf.Tensor) -> Any:
    """Returns what was computed from a per-replica batch, without the row of padding.

    Args:
        structure: Tensors with the rows of the per-replica batch along axis 0. Leaves without rows
            are returned unchanged.
        share_rows: Rows that count, int32 scalar; 0 if the only row is padding.
    """

    def rows_of(tensor: Any) -> Any:
        if not has_rows(tensor):
            return tensor
        return take(tensor, tf.constant(0), tf.where(share_rows > 0, num_rows(tensor), 0))

    return tf.nest.map_structure(rows_of, structure)


def pad_to_one_row(batch: Batch) -> Batch:
    """Returns the batch unchanged or, if it has no rows, one row of zeros and empty strings."""
    rows = tf.maximum(num_rows(batch), 1)

    def padded(tensor: Any) -> Any:
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

    return tf.nest.map_structure(padded, batch)


# ---- counting rows ----


def num_rows(batch: Batch) -> tf.Tensor:
    """Returns the number of rows of a batch, an int32 scalar: of its first tensor that has rows."""
    return _rows_of(next(leaf for leaf in tf.nest.flatten(batch) if has_rows(leaf)))


def has_rows(leaf: Any) -> bool:
    """Returns whether a leaf of a batch is a tensor with a first axis."""
    return leaf is not None and leaf.shape.rank != 0


def uneven(batch: Batch) -> str | None:
    """Returns a message if the parts of a batch differ in rows, else None; called eagerly."""
    sizes = {name: int(rows) for name, rows in _sizes(batch)}
    if len(set(sizes.values())) < 2:
        return None
    return _UNEVEN + ",".join(f" {name} has {rows}" for name, rows in sizes.items())


def assert_even(batch: Batch) -> None:
    """Makes the graph fail if the parts of a batch differ in rows; called in a graph."""
    sizes = _sizes(batch)
    rows = tf.stack([rows for _, rows in sizes])
    names = tf.constant([f" {name} has " for name, _ in sizes])
    texts = tf.strings.join([names, tf.strings.as_string(rows)])
    sizes_text = tf.strings.reduce_join(texts, separator=",")
    cure = (
        ", so it cannot be split over replicas: give all parts the same number of rows, or use the "
        "strategy one_device"
    )
    tf.debugging.Assert(
        tf.reduce_all(rows == rows[0]), [tf.strings.join([_UNEVEN, sizes_text, cure])]
    )


def _sizes(batch: Batch) -> list[tuple[str, tf.Tensor]]:
    """Returns name and number of rows of each part of a batch that has rows."""
    leaves = keras.tree.flatten_with_path(batch)
    return [("/".join(map(str, path)), _rows_of(leaf)) for path, leaf in leaves if has_rows(leaf)]


def _rows_of(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


# ---- checksums ----


def checksum(batch: Batch, check_data: CheckData = "full") -> tf.Tensor:
    """Returns an int64 number that tells different batches apart.

    All workers have to read the same global batches, and this detects if they do not.

    Args:
        batch: Nested tensors with rows along axis 0, of which a leaf may be None.
        check_data: What to hash. `"full"`: every element. `"sampled"`: labels and weights in full,
            and of large inputs a strided sample, which begins at another element in each batch.
            `"off"`: nothing.
    """
    result = tf.constant(0, tf.int64)
    if check_data == "off":
        return result
    inputs, others = (batch[0], batch[1:]) if isinstance(batch, tuple) else (batch, ())
    result = _hashed(result, others)
    if check_data == "sampled":
        first = _hashed(result, [leaf[:1] for leaf in _tensors(inputs) if leaf.shape.rank])
        samples = []
        for leaf in _tensors(inputs):
            flat = tf.reshape(leaf, [-1])
            stride = tf.clip_by_value(tf.size(flat) // _MIN_SAMPLE, 1, _MAX_STRIDE)
            samples.append(flat[tf.cast(first, tf.int32) % stride :: stride])
        inputs = samples
    return _hashed(result, inputs)


def _hashed(result: tf.Tensor, structure: Any) -> tf.Tensor:
    """Returns a checksum of an earlier one and all elements of nested tensors."""
    for leaf in _tensors(structure):
        # FarmHash of the bytes runs at the speed of memory, and reads shape and dtype, too.
        data = tf.io.serialize_tensor(leaf)
        result = combined_checksum(result, tf.strings.to_hash_bucket_fast(data, _CHECKSUM_PRIME))
    return result


def _tensors(structure: Any) -> list[tf.Tensor]:
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]


def combined_checksum(first: tf.Tensor, second: Any) -> tf.Tensor:
    """Returns the checksum of two things in this order, an int64 number."""
    return tf.math.floormod(first * 31 + tf.cast(second, tf.int64), _CHECKSUM_PRIME)
