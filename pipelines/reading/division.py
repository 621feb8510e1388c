"""Divides shards among input pipelines.

The division is disjoint, complete and even. Each pipeline gets the same number of whole files. The
remaining files, fewer than pipelines, are concatenated and cut into one run of records per
pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipelines.format.index import Shard


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
    """Returns records `start` to `stop` of concatenated shards."""
    ranges, begin = [], 0
    for shard in shards:
        end = begin + shard.num_records
        if begin < stop and start < end:
            ranges.append(ShardRange(shard, max(start - begin, 0), min(stop, end) - begin))
        begin = end
    return ranges
