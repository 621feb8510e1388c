"""Divides what one pipeline reads into blocks of records.

A block, the unit of reading and shuffling, is a short run of records in one file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from pipelines import storage
from pipelines.format.index import Index
from pipelines.reading.division import ShardRange
from pipelines.storage import AnyPath

#: Size of a block. Smaller blocks have more overhead, larger ones shuffle less well.
_LEAST_BYTES, _MOST_BYTES = 128 * 1024, 1024 * 1024
#: Number of blocks that a shuffle buffer should hold at least, for good shuffling.
_BLOCKS_IN_BUFFER = 32


class Blocks(NamedTuple):
    """The blocks that one pipeline reads, as columns; or one block, as scalars.

    Attributes:
        path: Path or URL of the file, string `(num_blocks,)`.
        offset: Byte offset of the first record; in a compressed file, its number. int64.
        first: Number of the first record among all records of the folder, int64.
        count: Number of records, at least one, int64.
        size: Size in the file in bytes, including framing; 0 for a compressed file, int64.
        skip: Number of records to skip at the beginning of the block, int64.
    """

    path: tf.Tensor
    offset: tf.Tensor
    first: tf.Tensor
    count: tf.Tensor
    size: tf.Tensor
    skip: tf.Tensor

    def rows(self, which: tf.Tensor) -> Blocks:
        """Returns some of the blocks."""
        return Blocks(*(tf.gather(column, which) for column in self))


class Records(NamedTuple):
    """Some records that were read.

    Attributes:
        serialized: The records, string `(n,)`.
        numbers: Number of each among all records of the folder, int64 `(n,)`.
    """

    serialized: tf.Tensor
    numbers: tf.Tensor


#: Turns blocks into a dataset of their `Records`, in the same order.
Reader = Callable[[Blocks], tf.data.Dataset]


def records_per_block(index: Index, shuffle_buffer: int) -> int:
    """Returns the number of records per block for a folder."""
    num_bytes = sum(shard.num_bytes for shard in index.shards)
    record_bytes = max(1, num_bytes // max(1, index.num_records))
    fitting = max(1, _MOST_BYTES // record_bytes)
    if shuffle_buffer:
        fitting = min(fitting, shuffle_buffer // _BLOCKS_IN_BUFFER)
    return max(1, _LEAST_BYTES // record_bytes, fitting)


def make_blocks(
    directory: str | AnyPath,
    index: Index,
    ranges: Sequence[ShardRange],
    *,
    size: int,
    offsets: np.ndarray | None,
) -> Blocks:
    """Divides the records that a pipeline reads into blocks.

    Args:
        directory: The folder of the files.
        index: Index of the whole folder.
        ranges: What the pipeline reads, at least one range.
        size: Records per block.
        offsets: Byte offset of each record of the folder in its file. None for compressed files,
            which are not divided.
    """
    before = np.cumsum([0, *(shard.num_records for shard in index.shards)]).tolist()
    before_shard = {shard.name: n for shard, n in zip(index.shards, before, strict=False)}
    num_bytes = {shard.name: shard.num_bytes for shard in index.shards}
    num_records = {shard.name: shard.num_records for shard in index.shards}
    rows: list[tuple[str, int, int, int, int]] = []
    for shard, begin, end in ranges:
        path, first = str(storage.at(directory) / shard.name), before_shard[shard.name]
        if offsets is None:
            rows.append((path, begin, first + begin, end - begin, 0))
            continue
        for at in range(begin, end, size):
            stop = min(at + size, end)
            is_last = stop == num_records[shard.name]
            last_byte = num_bytes[shard.name] if is_last else int(offsets[first + stop])
            first_byte = int(offsets[first + at])
            rows.append((path, first_byte, first + at, stop - at, last_byte - first_byte))
    paths, *numbers = zip(*rows, strict=True)
    offset, first, count, sizes = (tf.constant(column, tf.int64) for column in numbers)
    return Blocks(tf.constant(paths), offset, first, count, sizes, tf.zeros_like(count))
