"""Blocks, short runs of records that lie together in a file, and the records read of them.

A block is the unit that is found, shuffled and read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from pipelines.format.index import Index
from pipelines.reading.division import ShardRange

#: Bytes of a block. Below, calls cost more than bytes; above, mixing blocks mixes records less.
_LEAST_BYTES, _MOST_BYTES = 64 * 1024, 1024 * 1024
#: Blocks that a shuffle buffer should hold at least, so that it mixes many places.
_BLOCKS_IN_BUFFER = 16


class Blocks(NamedTuple):
    """Blocks that one pipeline reads, a column for each number; or one block, of scalars.

    Attributes:
        path: of the file, string `(num_blocks,)`.
        offset: where its first record begins: its byte, or its number where the file is compressed
            and no byte can be gone to; int64.
        first: its first record's number among all records of the folder, int64.
        count: records, at least one, int64.
        size: its bytes in the file, framing included; 0 for a compressed file, int64.
        skip: records at its beginning to leave out, int64.
        start: where the reading began that they are read for: the epoch, and the records left out
            from its beginning, int64 `(num_blocks, 2)`.
    """

    path: tf.Tensor
    offset: tf.Tensor
    first: tf.Tensor
    count: tf.Tensor
    size: tf.Tensor
    skip: tf.Tensor
    start: tf.Tensor

    def rows(self, which: tf.Tensor) -> Blocks:
        """Some of the blocks."""
        return Blocks(*(tf.gather(column, which) for column in self))


class Records(NamedTuple):
    """Some records on their way.

    Attributes:
        serialized: string `(n,)`.
        numbers: of each among all records of the folder, int64 `(n,)`.
        start: of the reading, as a block's, for each; int64 `(n, 2)`.
    """

    serialized: tf.Tensor
    numbers: tf.Tensor
    start: tf.Tensor

    @property
    def epoch(self) -> tf.Tensor:
        """The epoch of them all, int64, scalar."""
        # Not the first's: where a block is corrupt and left out, there is none.
        return tf.reduce_max(self.start[:, 0])

    @property
    def left_out(self) -> tf.Tensor:
        """Records of the epoch that were left out before the reading began, int64, scalar."""
        return tf.reduce_max(self.start[:, 1])


#: One block to a dataset of `Records` of any lengths.
Reader = Callable[[Blocks], tf.data.Dataset]


def records_per_block(index: Index, shuffle_buffer: int) -> int:
    """How many records a block of this folder should hold."""
    num_bytes = sum(shard.num_bytes for shard in index.shards)
    of_record = max(1, num_bytes // max(1, index.num_records))
    fitting = max(1, _MOST_BYTES // of_record)
    if shuffle_buffer:
        fitting = min(fitting, shuffle_buffer // _BLOCKS_IN_BUFFER)
    return max(1, _LEAST_BYTES // of_record, fitting)


def blocks_of(
    directory: str | Path,
    index: Index,
    ranges: Sequence[ShardRange],
    *,
    size: int,
    offsets: np.ndarray | None,
) -> Blocks:
    """Cuts what a pipeline reads into blocks.

    Args:
        directory: where the files lie.
        index: of the whole folder.
        ranges: of its shards, at least one.
        size: records of a block.
        offsets: the byte at which each record of the folder begins, in its file. None for
            compressed files, which stay in one piece.
    """
    before = np.cumsum([0, *(shard.num_records for shard in index.shards)]).tolist()
    before_shard = {shard.name: n for shard, n in zip(index.shards, before, strict=False)}
    num_bytes = {shard.name: shard.num_bytes for shard in index.shards}
    num_records = {shard.name: shard.num_records for shard in index.shards}
    rows: list[tuple[str, int, int, int, int]] = []
    for shard, begin, end in ranges:
        path, first = str(Path(directory) / shard.name), before_shard[shard.name]
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
    skip, start = tf.zeros(len(rows), tf.int64), tf.zeros((len(rows), 2), tf.int64)
    return Blocks(tf.constant(paths), offset, first, count, sizes, skip, start)
