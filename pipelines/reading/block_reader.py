"""Reading one block of records; one that cannot be read is looked at again, to say what is wrong.

TensorFlow's own error for a corrupt record names no file, and ends the file there. So a reader that
fails just ends early, and whoever then asks for the missing records gets what stands behind them.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import tensorflow as tf

from pipelines.errors import DataError
from pipelines.format import record_file
from pipelines.format.compression import Compression
from pipelines.reading.blocks import Blocks, Reader, Records

_READ_BYTES = 256 * 1024
_log = logging.getLogger("pipelines")


class Skipped:
    """Counts the corrupt records that were left out, and names each in the log."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, problem: str) -> None:
        """Notes one."""
        with self._lock:
            self.count += 1
            _log.warning("%s; left out, %d so far", problem, self.count)


def block_reader(offsets: np.ndarray, skipped: Skipped | None, *, portable: bool) -> Reader:
    """What reads a block of an uncompressed file as one element.

    Args:
        offsets: the byte at which each record of the folder begins, in its file.
        skipped: takes note of corrupt records, which are left out; None: they are errors.
        portable: use no Python while reading, so that another process can; an error then names the
            file, but not the byte.

    Returns:
        A block to `Records`. Errors are `tf.errors.InvalidArgumentError`, or
        `tf.errors.NotFoundError` of a file that has gone.
    """

    def read(block: Blocks) -> tf.data.Dataset:
        found = tf.raw_ops.TFRecordDatasetV2(
            filenames=block.path[tf.newaxis],
            compression_type="",
            buffer_size=tf.constant(_READ_BYTES, tf.int64),
            byte_offsets=block.offset[tf.newaxis],
        )
        found = tf.data.experimental.from_variant(found, tf.TensorSpec((), tf.string))
        found = _opened(block.path).concatenate(found.ignore_errors())
        # All or nothing: what is left of a damaged block would come under wrong numbers.
        found = found.skip(block.skip).batch(block.count - block.skip, drop_remainder=True)
        numbers = tf.range(block.first + block.skip, block.first + block.count)
        columns = map(tf.data.Dataset.from_tensors, (numbers, _starts(block, numbers)))
        whole = tf.data.Dataset.zip(Records(found, *columns))
        again = tf.data.Dataset.from_tensors(block).map(
            _fail if portable else lambda block: _look_again(block, offsets, skipped)
        )
        return whole.concatenate(again).take(1)

    return read


def sequential_reader(compression: Compression, num_together: int) -> Reader:
    """What reads a block of a compressed file, from the file's beginning.

    Returns:
        As `block_reader`'s, in elements of up to `num_together` records.
    """

    def read(block: Blocks) -> tf.data.Dataset:
        found = tf.data.TFRecordDataset(block.path, compression, buffer_size=_READ_BYTES)
        failed = tf.data.Dataset.from_tensors(block).map(lambda block: _fail(block).serialized[0])
        found = _opened(block.path).concatenate(found.ignore_errors()).concatenate(failed)
        # Taking no more than there are: zipping asks for one more record before it sees the end.
        found = found.skip(block.offset + block.skip).take(block.count - block.skip)
        numbers = tf.data.Dataset.range(block.first + block.skip, block.first + block.count)
        starts = tf.data.Dataset.from_tensors(block.start).repeat()
        return tf.data.Dataset.zip(Records(found, numbers, starts)).batch(num_together)

    return read


def _opened(path: tf.Tensor) -> tf.data.Dataset:
    """Nothing, or the error of a file that cannot be opened.

    `ignore_errors` would try such a file again for ever.
    """
    return tf.data.FixedLengthRecordDataset(path, 1, buffer_size=1).take(1).skip(1)


def _fail(block: Blocks) -> Records:
    """The error of a block of which no more is known than its file."""
    problem = ": corrupt or truncated, fewer records can be read than the index lists; restore it"
    tf.debugging.Assert(False, [block.path + problem])
    return Records(block.path[tf.newaxis], block.first[tf.newaxis], block.start[tf.newaxis])


def _look_again(block: Blocks, offsets: np.ndarray, skipped: Skipped | None) -> Records:
    """What can be read of a block record by record; an error, unless that is to be skipped."""

    def look(path: bytes, first: int, stop: int) -> tuple[np.ndarray, np.ndarray, bytes]:
        found: dict[int, bytes] = {}
        with Path(path.decode()).open("rb") as file:
            for number in range(first, stop):
                try:
                    found[number] = record_file.read_at(file, int(offsets[number]))
                except DataError as error:
                    if skipped is None:
                        return np.array([b""], object), np.zeros(1, np.int64), str(error).encode()
                    skipped.add(str(error))
        return np.array([*found.values()], object), np.array([*found], np.int64), b""

    serialized, numbers, problem = tf.numpy_function(
        look,
        [block.path, block.first + block.skip, block.first + block.count],
        (tf.string, tf.int64, tf.string),
    )
    tf.debugging.Assert(tf.strings.length(problem) == 0, [problem])
    numbers = tf.ensure_shape(numbers, (None,))
    return Records(tf.ensure_shape(serialized, (None,)), numbers, _starts(block, numbers))


def _starts(block: Blocks, numbers: tf.Tensor) -> tf.Tensor:
    """The start of the reading, for each of a block's records, int64 `(n, 2)`."""
    return tf.broadcast_to(block.start, [tf.size(numbers), 2])
