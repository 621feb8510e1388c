"""Reads blocks of records from local files.

TensorFlow's error for a corrupt record does not name the file, and ends reading of that file.
Therefore a block that fails is read again record by record, which names the corrupt record, or
returns the intact ones.
"""

from __future__ import annotations

import functools
import logging
import threading

import numpy as np
import tensorflow as tf

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format import record_file
from pipelines.format.offsets import OFFSETS_NAME
from pipelines.format.record_file import FRAMING_BYTES, Compression
from pipelines.reading.blocks import Blocks, Reader, Records

_READ_BYTES = 256 * 1024
#: Blocks that are read in parallel by default. `tf.data` would tune their number up to that of the
#: cores, and reads from a network disk mostly wait.
_NUM_READS = 16
#: No records, and no numbers.
_NOTHING = np.array([b""], object), np.zeros(1, np.int64)
_log = logging.getLogger("pipelines")


class SkippedRecords:
    """Counts and logs the corrupt records that were skipped."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, problem: str) -> None:
        """Counts and logs a record."""
        with self._lock:
            self.count += 1
            _log.warning("%s; skipped, %d so far", problem, self.count)


def block_reader(
    offsets: np.ndarray, skipped: SkippedRecords | None, *, portable: bool, num_reads: int
) -> Reader:
    """Returns a reader of uncompressed local files, which yields a block per element.

    Args:
        offsets: Byte offset of each record of the folder in its file.
        skipped: Counts corrupt records, which are then skipped; None: they are errors.
        portable: Whether to avoid Python functions, so that another process can run the graph. An
            error then names the file but not the byte.
        num_reads: Blocks that are read in parallel; `tf.data.AUTOTUNE`: the default.

    Returns:
        A function from blocks to a dataset of `Records`. Its errors are
        `tf.errors.InvalidArgumentError`, or `tf.errors.NotFoundError` for a file that is missing.
    """

    def again(block: Blocks) -> Records:
        return _fail(block) if portable else _read_again(block, offsets, skipped)

    def read_block(block: Blocks) -> Records:
        serialized, is_intact = _whole_block(block)
        numbers = tf.range(block.first + block.skip, block.first + block.count)
        records = Records(serialized[block.skip :], numbers)
        # All or nothing: after damage, the remaining records would get wrong numbers.
        return tf.cond(is_intact, lambda: records, lambda: again(block))

    num_calls = num_reads if num_reads > 0 else _NUM_READS
    return lambda blocks: tf.data.Dataset.from_tensor_slices(blocks).map(read_block, num_calls)


def _whole_block(block: Blocks) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the records of a block, and whether none of them is corrupt or missing."""
    # Larger records would only be copied once more.
    is_small = block.size < block.count * _READ_BYTES
    records = tf.raw_ops.TFRecordDatasetV2(
        filenames=block.path[tf.newaxis],
        compression_type="",
        buffer_size=tf.where(is_small, tf.constant(_READ_BYTES, tf.int64), 0),
        byte_offsets=block.offset[tf.newaxis],
    )
    records = tf.data.experimental.from_variant(records, tf.TensorSpec((), tf.string))
    # A file that cannot be opened fails at every attempt, and `ignore_errors` would retry forever.
    # With `zip`, each failure uses up a number, so that the retries end.
    numbered = tf.data.Dataset.zip(tf.data.Dataset.range(block.count), records).ignore_errors()
    end = tf.data.Dataset.from_tensors((np.int64(-1), ""))  # so that there is an element
    batches = numbered.concatenate(end).batch(block.count).take(1)
    numbers, serialized = batches.get_single_element()
    lengths = tf.strings.length(serialized)
    size = tf.reduce_sum(tf.cast(lengths, tf.int64) + FRAMING_BYTES)
    # Blocks that end where the next one begins cover the file without repeating a record.
    return serialized, (numbers[-1] == block.count - 1) & (size == block.size)


def sequential_reader(compression: Compression, num_together: int) -> Reader:
    """Returns a reader of compressed local files, each of which is read from its beginning.

    Returns:
        A function as `block_reader` returns it, with elements of up to `num_together` records.
    """

    def read_block(block: Blocks) -> tf.data.Dataset:
        serialized = tf.data.TFRecordDataset(block.path, compression, buffer_size=_READ_BYTES)
        numbers = tf.data.Dataset.range(block.first - block.offset, block.first + block.count)
        # `zip` as in `_whole_block`.
        records = tf.data.Dataset.zip(Records(serialized, numbers)).ignore_errors()
        failed = tf.data.Dataset.from_tensors(block).map(_fail).unbatch()
        records = records.concatenate(failed).skip(block.offset + block.skip)
        # `take` stops exactly at the end, because `zip` would request one more record.
        return records.take(block.count - block.skip).batch(num_together)

    return lambda blocks: tf.data.Dataset.from_tensor_slices(blocks).flat_map(read_block)


def _opened(path: tf.Tensor) -> tf.data.Dataset:
    return tf.data.FixedLengthRecordDataset(path, 1, buffer_size=1).take(1).skip(1)


def _check_exists(path: tf.Tensor) -> None:
    opened = _opened(path).reduce(np.int64(0), lambda count, _: count + 1)
    tf.debugging.assert_equal(opened, np.int64(0))


def _fail(block: Blocks) -> Records:
    _check_exists(block.path)
    problem = ": corrupt or truncated: it has fewer readable records than the index; restore it"
    tf.debugging.Assert(False, [block.path + problem])
    return Records(block.path[tf.newaxis], block.first[tf.newaxis])


def _read_again(block: Blocks, offsets: np.ndarray, skipped: SkippedRecords | None) -> Records:
    """Reads a block record by record, and returns the intact ones or fails with the damage."""
    _check_exists(block.path)
    serialized, numbers, problem = tf.numpy_function(
        functools.partial(read_intact_records, offsets, skipped),
        [block.path, block.first, block.first + block.count, block.size],
        (tf.string, tf.int64, tf.string),
    )
    tf.debugging.Assert(tf.strings.length(problem) == 0, [problem])
    mask = tf.ensure_shape(numbers, (None,)) >= block.first + block.skip
    serialized = tf.boolean_mask(tf.ensure_shape(serialized, (None,)), mask)
    return Records(serialized, tf.boolean_mask(tf.ensure_shape(numbers, (None,)), mask))


def read_intact_records(
    offsets: np.ndarray,
    skipped: SkippedRecords | None,
    path: bytes,
    first: int,
    stop: int,
    size: int,
) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Reads a block record by record.

    Args:
        offsets: Byte offset of each record of the folder in its file.
        skipped: Counts corrupt records, which are then skipped; None: they are errors.
        path: Path or URL of the file.
        first: Number of the first record of the block.
        stop: Number of the first record after the block.
        size: Size of the block in bytes.

    Returns:
        The intact records, their numbers, and a description of the first error or empty bytes.
    """
    location = storage.at(path.decode())
    intact: dict[int, bytes] = {}
    problems: list[str] = []
    try:
        num_bytes = storage.num_bytes(location)
        with location.open("rb") as file:
            for number in range(first, stop):
                try:
                    intact[number] = record_file.read_at(file, int(offsets[number]), num_bytes)
                except record_file.DamageError as error:
                    problems.append(str(error))
    except (OSError, DataError) as error:  # says nothing about the records: nothing is skipped
        return *_NOTHING, description(error)
    if not problems and size != sum(len(data) + FRAMING_BYTES for data in intact.values()):
        table = location.parent / OFFSETS_NAME
        problems.append(f"{table}: does not match {location}; delete {OFFSETS_NAME}")
    elif skipped is not None:
        for problem in problems:
            skipped.add(problem)
        problems = []
    if problems:
        return *_NOTHING, problems[0].encode()
    return np.array([*intact.values()], object), np.array([*intact], np.int64), b""


def description(error: Exception) -> bytes:
    """Returns a line that describes an error of reading a file."""
    if isinstance(error, FileNotFoundError):
        return f"{error.filename}: the file is missing; restore it".encode()
    return str(error).encode()
