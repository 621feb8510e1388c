"""Blocks: short runs of records that lie together in a file, the unit that is found and read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from pipelines.format.index import Index
from pipelines.reading.division import FileShare

#: Bytes of a block. Below, calls cost more than bytes; above, mixing blocks mixes records less.
_LEAST_BYTES, _MOST_BYTES = 64 * 1024, 1024 * 1024
#: Blocks that a shuffle buffer should hold at least, so that it mixes many places.
_BLOCKS_IN_BUFFER = 16


class Blocks(NamedTuple):
    """Blocks of one pipeline's share, a column for each number; or one block, of scalars.

    Attributes:
        path: of the file, string `(num_blocks,)`.
        offset: where its first record begins: its byte, or its number where the file is compressed
            and no byte can be gone to; int64.
        first: its first record's number among all records of the folder, int64.
        count: records, at least one, int64.
        skip: records at its beginning to leave out, int64.
        lap: the epoch that they are read for, and how many records of it were left out from its
            beginning, int64 `(num_blocks, 2)`.
    """

    path: tf.Tensor
    offset: tf.Tensor
    first: tf.Tensor
    count: tf.Tensor
    skip: tf.Tensor
    lap: tf.Tensor

    def rows(self, which: tf.Tensor) -> Blocks:
        """Some of the blocks."""
        return Blocks(*(tf.gather(column, which) for column in self))


def records_per_block(index: Index, shuffle_buffer: int) -> int:
    """How many records a block of this folder should hold."""
    num_bytes = sum(shard.num_bytes for shard in index.shards)
    of_record = max(1, num_bytes // max(1, index.num_records))
    fitting = max(1, _MOST_BYTES // of_record)
    if shuffle_buffer:
        fitting = min(fitting, shuffle_buffer // _BLOCKS_IN_BUFFER)
    return max(1, _LEAST_BYTES // of_record, fitting)


def of_share(
    directory: str | Path,
    index: Index,
    shares: Sequence[FileShare],
    *,
    size: int,
    offsets: np.ndarray | None,
) -> Blocks:
    """Cuts a share into blocks.

    Args:
        directory: where the files lie.
        index: of the whole folder.
        shares: of its shards, at least one.
        size: records of a block.
        offsets: the byte at which each record of the folder begins, in its file. None for
            compressed files, which stay in one piece.
    """
    before = np.cumsum([0, *(shard.num_records for shard in index.shards)]).tolist()
    before_shard = {shard.name: n for shard, n in zip(index.shards, before, strict=False)}
    rows: list[tuple[str, int, int, int]] = []
    for share in shares:
        path, first = str(Path(directory) / share.shard.name), before_shard[share.shard.name]
        if offsets is None:
            rows.append((path, share.start, first + share.start, share.num_records))
            continue
        for start in range(share.start, share.stop, size):
            offset = int(offsets[first + start])
            rows.append((path, offset, first + start, min(size, share.stop - start)))
    paths, *numbers = zip(*rows, strict=True)
    offset, first, count = (tf.constant(column, tf.int64) for column in numbers)
    nothing = tf.zeros(len(rows), tf.int64)
    lap = tf.stack([nothing, nothing], axis=1)
    return Blocks(tf.constant(paths), offset, first, count, nothing, lap)
