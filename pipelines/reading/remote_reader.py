"""Reads blocks of records from an object store, ahead of their use.

The blocks of an epoch and their order are known in advance, so that exactly their byte ranges are
fetched, many at a time. Records, order, resuming and reports of damage are those of local files.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format import record_file
from pipelines.format.record_file import Compression
from pipelines.reading.block_reader import SkippedRecords, description, read_intact_records
from pipelines.reading.blocks import Blocks, Reader, Records
from pipelines.reading.read_ahead import Fetch, Range, read_ahead

#: `Records`, and the description of an error or empty bytes.
_SIGNATURE = (
    Records(tf.TensorSpec((None,), tf.string), tf.TensorSpec((None,), tf.int64)),
    tf.TensorSpec((), tf.string),
)
#: Numbers of glibc's parameters.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Size up to which glibc reuses the memory of buffers; the most that it accepts.
_MOST_REUSED_BYTES = 32 << 20
#: Blocks per element of a dataset. An element costs 0.4 ms in TensorFlow's Python code.
_BLOCKS_TOGETHER = 8
_NOTHING = Records(np.zeros(0, object), np.zeros(0, np.int64))


def remote_reader(
    offsets: np.ndarray, skipped: SkippedRecords | None, *, fetch: Fetch, limit: int, merge: bool
) -> Reader:
    """Returns a reader of blocks of uncompressed remote files, which yields a block per element.

    Args:
        offsets: Byte offset of each record of the folder in its file.
        skipped: Counts corrupt records, which are then skipped; None: they are errors.
        fetch: Returns the bytes of a range.
        limit: Bound of the bytes that are read ahead.
        merge: Whether neighboring blocks are fetched by one request.
    """

    def read(blocks: list[Blocks]) -> Iterator[Records]:
        ranges = (Range(b.path.decode(), b.offset, b.offset + b.size) for b in blocks)
        fetched = read_ahead(ranges, fetch, limit, merge=merge)
        for block, data in zip(blocks, fetched, strict=True):
            stop, problem = block.first + block.count, b""
            numbers = np.arange(block.first, stop)
            parts = record_file.split(data, offsets[block.first : stop] - block.offset)
            if parts is None:
                serialized, numbers, problem = read_intact_records(
                    offsets, skipped, block.path, block.first, stop, block.size
                )
            else:
                serialized = np.array(parts, object)
            if problem:
                raise DataError(problem.decode())
            wanted = numbers >= block.first + block.skip
            yield Records(serialized[wanted], numbers[wanted])

    return _reader(read)


def remote_sequential_reader(compression: Compression, num_together: int) -> Reader:
    """Returns a reader of compressed remote files, each of which is read from its beginning."""

    def read(blocks: list[Blocks]) -> Iterator[Records]:
        for block in blocks:
            records = record_file.intact_records(storage.at(block.path.decode()), compression)
            # The offset of a block of a compressed file is the number of its first record.
            begin, end = block.offset + block.skip, block.offset + block.count
            wanted = itertools.islice(records, begin, end)
            number = block.first + block.skip
            while chunk := list(itertools.islice(wanted, num_together)):
                serialized = np.array([record.data for record in chunk], object)
                yield Records(serialized, np.arange(number, number + len(chunk)))
                number += len(chunk)
            if number < block.first + block.count:
                raise DataError(
                    f"{block.path.decode()}: corrupt or truncated: it has fewer readable records "
                    "than the index; restore it"
                )

    return _reader(read)


def fetch_range(wanted: Range) -> bytes:
    """Returns the bytes of a range of a remote file."""
    return storage.RemotePath(wanted.path).read_range(wanted.begin, wanted.end)


def _reuse_large_buffers() -> None:
    """Lets glibc reuse the memory of freed buffers, as it does by default.

    TensorFlow's implementation of `from_generator` turns this off for the whole process, because
    some generators fragmented the memory (github.com/tensorflow/tensorflow/issues/65675). Without
    it, each buffer of 128 KB or more consists of new pages, which the operating system has to
    clear: a batch of images takes an eighth longer.
    """
    # Other C libraries have no `mallopt`, or ignore it.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, _MOST_REUSED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 4 * _MOST_REUSED_BYTES)


def _reader(read: Callable[[list[Blocks]], Iterator[Records]]) -> Reader:
    def elements(*columns: np.ndarray) -> Iterator[tuple[Records, bytes]]:
        """Yields an error as the last element, which keeps its message and type in the graph."""
        _reuse_large_buffers()
        together: list[Records] = []
        problem = b""
        try:
            for records in read(list(map(Blocks, *(column.tolist() for column in columns)))):
                together.append(records)
                if len(together) == _BLOCKS_TOGETHER:
                    yield _joined(together), b""
                    together = []
        except (OSError, DataError) as error:
            problem = description(error)
        if together:
            yield _joined(together), b""
        if problem:
            yield _NOTHING, problem

    def checked(records: Records, problem: tf.Tensor) -> Records:
        # Control dependencies are automatic in functions of `tf.data`.
        tf.debugging.Assert(tf.strings.length(problem) == 0, [problem])
        return records

    def dataset(blocks: Blocks) -> tf.data.Dataset:
        generated = tf.data.Dataset.from_generator(
            elements, args=tuple(blocks), output_signature=_SIGNATURE
        )
        return generated.map(checked)

    return dataset


def _joined(parts: list[Records]) -> Records:
    return Records(*map(np.concatenate, zip(*parts, strict=True)))
