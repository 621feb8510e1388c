"""From a folder of shards to batches: `read` top to bottom is the order of execution."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from pipelines import schema
from pipelines.errors import DataError
from pipelines.index import check_shards, load_index
from pipelines.share import FileShare, share_of

# Constants, not AUTOTUNE: the order of records depends on them, and must not on the machine.
CYCLE_LENGTH = 16  # files open at once
BLOCK_LENGTH = 16  # records taken from a file before the next file's turn
READ_BYTES = 256 * 1024  # read from a file at a time


def read(
    directory: str | Path,
    batch_size: int,
    *,
    shuffle_buffer: int = 0,
    seed: int | None = None,
    map_fn: Callable[[dict[str, tf.Tensor]], object] | None = None,
    batch_fn: Callable[[object], object] | None = None,
    context: tf.distribute.InputContext | None = None,
    drop_remainder: bool = False,
    deterministic: bool | None = None,
) -> tf.data.Dataset:
    """Reads a folder that `write_shards` made.

    Args:
        directory: the folder.
        batch_size: the global batch: examples per batch over all input pipelines.
        shuffle_buffer: examples to shuffle among, after the files' order was shuffled; every
            iteration gets another order. 0 reads in the order of the files.
        seed: makes the sequence of orders the same for each new dataset (as long as
            `tf.random.set_seed`, which `tf.data` mixes in, was given the same number too).
        map_fn: what to make of one example, a dictionary of arrays; run in parallel.
        batch_fn: what to make of a batch of `map_fn`'s results, or of dictionaries; run in
            parallel. For what needs no look at single examples it is many times cheaper.
        context: says which share of the data and of each batch is this pipeline's. Without one
            the dataset holds everything.
        drop_remainder: leave out the last batch of an epoch where it is not full.
        deterministic: whether the order may not depend on timing. By default it may only where
            there is a shuffle without a seed.

    Returns:
        Batches, by default as dictionaries by feature name; the cardinality is known. TensorFlow
        is told not to shard it again.

    Raises:
        DataError: the index or a shard is missing or of another size. A shard that is found
            corrupt only while reading raises `tf.errors.InvalidArgumentError` naming the file.
        ValueError: the batch cannot be divided among the pipelines.
    """
    index = load_index(directory)
    num_pipelines = context.num_input_pipelines if context else 1
    if batch_size < 1 or batch_size % num_pipelines:
        raise ValueError(
            f"batch_size: expected a positive multiple of the {num_pipelines} input pipelines, "
            f"got {batch_size}"
        )
    shares = share_of(index.shards, num_pipelines, context.input_pipeline_id if context else 0)
    check_shards(directory, (share.shard for share in shares))
    num_records = sum(share.num_records for share in shares)
    if num_records == 0:
        raise DataError(
            f"{directory}: expected at least one record for each of {num_pipelines} input "
            f"pipelines, found {index.num_records} in all; write more or use fewer workers"
        )
    decode = functools.partial(schema.decode, features=index.features)

    dataset = _files(directory, shares)
    if shuffle_buffer:
        # Files first: they carry examples further than a buffer can.
        dataset = dataset.shuffle(len(shares), seed, reshuffle_each_iteration=True)
    dataset = dataset.interleave(
        _records, CYCLE_LENGTH, BLOCK_LENGTH, num_parallel_calls=tf.data.AUTOTUNE
    )
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(num_records))
    if shuffle_buffer:
        # Before decoding, so that the buffer holds what is stored, not what it grows to.
        dataset = dataset.shuffle(shuffle_buffer, seed, reshuffle_each_iteration=True)
    if map_fn:
        dataset = dataset.map(lambda record: map_fn(decode(record)), tf.data.AUTOTUNE)
    dataset = dataset.batch(batch_size // num_pipelines, drop_remainder)
    if not map_fn:
        # Whole batches: calling a function costs more than parsing a small record.
        dataset = dataset.map(decode, tf.data.AUTOTUNE)
    if batch_fn:
        dataset = dataset.map(batch_fn, tf.data.AUTOTUNE)
    dataset = dataset.prefetch(tf.data.AUTOTUNE)

    options = tf.data.Options()
    ordered = not shuffle_buffer or seed is not None
    options.deterministic = ordered if deterministic is None else deterministic
    # Sharding is handed in; a second one by tf.distribute would lose records without a word.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def _files(directory: str | Path, shares: list[FileShare]) -> tf.data.Dataset:
    """One element per file: path, records in the file, stride and offset of this share."""
    paths = [str(Path(directory) / share.shard.name) for share in shares]
    numbers = [(share.shard.num_records, share.stride, share.offset) for share in shares]
    return tf.data.Dataset.from_tensor_slices((paths, tf.constant(numbers, tf.int64)))


def _records(path: tf.Tensor, numbers: tf.Tensor) -> tf.data.Dataset:
    """The serialized records of a share, or an error that names its file.

    TensorFlow's own error for a corrupt record names no file. So a reader that fails just ends
    early, and whoever then asks for the missing records meets the error element behind them.
    """
    num_records, stride, offset = numbers[0], numbers[1], numbers[2]
    # A file that cannot be opened must fail here: ignore_errors would try it again for ever.
    opens = tf.data.FixedLengthRecordDataset(path, 1, buffer_size=1).take(1).filter(_nothing)
    found = tf.data.TFRecordDataset(path, buffer_size=READ_BYTES).ignore_errors(log_warning=True)
    failed = tf.data.Dataset.from_tensors(path).map(_corrupt)
    return opens.concatenate(found).concatenate(failed).take(num_records).shard(stride, offset)


def _nothing(_: tf.Tensor) -> tf.Tensor:
    return tf.constant(False)


def _corrupt(path: tf.Tensor) -> tf.Tensor:
    cure = ": corrupt or truncated, fewer records can be read than the index lists; restore it, or "
    cure += "delete the folder and write it again"
    tf.debugging.Assert(False, [path + cure])
    return path
