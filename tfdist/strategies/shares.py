"""Splitting a global batch into the shares of the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.strategies.row_counts import assert_even, has_rows, num_rows
from tfdist.upstream.tensorflow_data import is_prefetched

Batch = Any  # nested tuples, lists and dicts of tensors with rows along axis 0


class Share(NamedTuple):
    """What one replica computes of a global batch.

    There is always a row: TensorFlow's convolutions and poolings fail or abort on none, and other
    people's code may. A share without rows has one that stands in, for nothing that is counted:
    see `stand_in`.
    """

    num_rows: Any  # that count; int32 scalar, may be 0
    rows: Batch  # as many; or one, where none counts


class Element(NamedTuple):
    """What a process gets of one global batch."""

    num_rows: Any  # of the global batch; int32 scalar
    checksum: Any  # of the global batch, which tells workers whose data differ; int64 scalar
    shares: Sequence[Share]  # one a replica of this process


def distributed(
    dataset: tf.data.Dataset, split: Callable[[Batch], Element], devices: Sequence[str]
) -> tf.data.Dataset:
    """Returns a data set of elements, made ahead of the steps.

    Args:
        dataset: Of batches.
        split: Makes an element of a batch.
        devices: As `ahead` takes them.
    """
    # `tf.data` takes a tuple apart, one of a single part too: several inputs without labels.
    is_tuple = isinstance(dataset.element_spec, tuple)

    def element(*batch: Batch) -> Element:
        return split(without_optionals(batch if is_tuple else batch[0]))

    # Nothing in it is for AutoGraph, whose conversion takes about as long as the tracing.
    convert = tf.autograph.experimental.do_not_convert
    return ahead(dataset.map(convert(element), tf.data.AUTOTUNE, deterministic=True), devices)


def ahead(dataset: tf.data.Dataset, devices: Sequence[str]) -> tf.data.Dataset:
    """Returns a data set of the same, which is read ahead of the steps.

    Args:
        dataset: Of anything.
        devices: Of this process, one a replica; a GPU that is the only one is given its share ahead
            of time.
    """
    if len(devices) == 1 and devices[0].startswith("GPU"):
        return dataset.apply(tf.data.experimental.prefetch_to_device(devices[0]))
    # A second buffer behind the user's own costs a small step a tenth: one thread more to wake.
    return dataset if is_prefetched(dataset) else dataset.prefetch(tf.data.AUTOTUNE)


def split(
    batch: Batch, num_shares: int, wanted: Sequence[int], rows: tf.Tensor | None = None
) -> tuple[Share, ...]:
    """Splits a batch into consecutive shares whose sizes differ by one row at most.

    A batch of fewer rows than shares leaves some shares without rows: a row of another stands in.
    What has no rows, a single number, is each share's.
    In order, so that what the replicas return can be laid end to end.

    Args:
        batch: To split.
        num_shares: Into how many.
        wanted: The numbers of the shares to return.
        rows: How many rows of the batch count; None: all that it has.
    """
    rows = num_rows(batch) if rows is None else rows
    if num_shares == 1:
        return (Share(rows, batch),)
    assert_even(batch)
    bounds = [(rows * i // num_shares, rows * (i + 1) // num_shares) for i in wanted]
    return tuple(share(batch, begin, end) for begin, end in bounds)


def uncut(batch: Batch, num_shares: int) -> tuple[Share, ...]:
    """Returns the whole batch as the share of each replica: see `Strategy.distribute`."""
    return (Share(num_rows(batch), batch),) * num_shares


def share(batch: Batch, begin: tf.Tensor, end: tf.Tensor) -> Share:
    """Returns the share from one row of a batch up to another; where none is, the next stands in.

    Args:
        batch: Of more than `begin` rows.
        begin: The first row, int32 scalar.
        end: The row after the last, int32 scalar.
    """
    return Share(end - begin, take(batch, begin, tf.maximum(end, begin + 1)))


def take(batch: Batch, begin: tf.Tensor, end: tf.Tensor) -> Batch:
    """Returns the rows from `begin` up to `end` of each tensor of a batch."""

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


def without_rows(element_spec: Any) -> tf.data.Dataset:
    """Returns a data set of one batch, of the shapes and dtypes given, that has no rows."""

    def empty(spec: Any) -> Any:
        if isinstance(spec, tf.RaggedTensorSpec):
            values = tf.zeros([0, *spec.shape[spec.ragged_rank + 1 :]], spec.dtype)
            return tf.RaggedTensor.from_nested_row_lengths(
                values, [tf.zeros([0], spec.row_splits_dtype)] * spec.ragged_rank
            )
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.sparse.from_dense(tf.zeros([0, *spec.shape[1:]], spec.dtype))
        if spec.shape.rank == 0:
            return tf.zeros([], spec.dtype)
        return tf.zeros([0, *(size or 1 for size in spec.shape[1:])], spec.dtype)

    return tf.data.Dataset.from_tensors(tf.nest.map_structure(empty, element_spec))


def is_plain(dataset: tf.data.Dataset) -> bool:
    """Tells whether a data set has no Optionals, which stand for None."""
    return not any(
        isinstance(spec, tf.OptionalSpec) for spec in tf.nest.flatten(dataset.element_spec)
    )


def without_optionals(batch: Batch) -> Batch:
    """Turns the empty Optionals that Keras's generator adapter yields back into None."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch
    )
