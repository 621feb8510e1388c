"""Divides shards among input pipelines, and what one of them reads into blocks of records.

The division is disjoint, complete and even. Each pipeline gets the same number of whole files. The
remaining files, fewer than pipelines, are concatenated and cut into one run of records per
pipeline. A block, the unit of reading and shuffling, is a short run of records in one file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from pipelines import storage
from pipelines.format.index import Index, Shard
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


class ShardRange(NamedTuple):
    """Records `start` to `stop` of one shard."""

    shard: Shard
    start: int
    stop: int

    @property
    def num_records(self) -> int:
        """Number of records in the range."""
        return self.stop - self.start


def divide_shards(shards: Sequence[Shard], num_pipelines: int, pipeline: int) -> list[ShardRange]:
    """Returns the part of the shards that one pipeline reads.

    Args:
        shards: All shards, in the same order on every pipeline.
        num_pipelines: Number of pipelines that divide them.
        pipeline: Number of this pipeline, from 0.

    Returns:
        Ranges that are not empty. Over all pipelines they contain every record exactly once.

    Raises:
        ValueError: `pipeline` is not less than `num_pipelines`.
    """
    if not 0 <= pipeline < num_pipelines:
        raise ValueError(f"pipeline: expected 0 to {num_pipelines - 1}, got {pipeline}")
    num_whole = len(shards) - len(shards) % num_pipelines
    whole, divided = shards[:num_whole], shards[num_whole:]
    quotas = _quotas(
        [sum(s.num_records for s in whole[i::num_pipelines]) for i in range(num_pipelines)],
        sum(s.num_records for s in divided),
    )
    start = sum(quotas[:pipeline])
    ranges = [ShardRange(shard, 0, shard.num_records) for shard in whole[pipeline::num_pipelines]]
    ranges += _run(divided, start, start + quotas[pipeline])
    return [shard_range for shard_range in ranges if shard_range.num_records]


def _quotas(counts: Sequence[int], remaining: int) -> list[int]:
    """Returns how many of `remaining` records each pipeline gets so that the totals are even."""
    for num_filled in range(len(counts), 0, -1):
        # The pipelines with the fewest records are filled to one level, the others get none.
        filled = sorted(range(len(counts)), key=lambda i: counts[i])[:num_filled]
        level, extra = divmod(sum(counts[i] for i in filled) + remaining, num_filled)
        if level >= counts[filled[-1]]:
            break
    quotas = [0] * len(counts)
    for i in filled:
        quotas[i] = level - counts[i]
    for i in sorted(filled)[:extra]:
        quotas[i] += 1
    return quotas


def _run(shards: Sequence[Shard], start: int, stop: int) -> list[ShardRange]:
    ranges, begin = [], 0
    for shard in shards:
        end = begin + shard.num_records
        if begin < stop and start < end:
            ranges.append(ShardRange(shard, max(start - begin, 0), min(stop, end) - begin))
        begin = end
    return ranges
