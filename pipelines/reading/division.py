"""Which records are whose: a disjoint, complete, even division of shards among input pipelines.

Files are dealt out whole while every pipeline gets equally many; the rest, fewer files than
pipelines, are laid end to end and cut into one run of records for each pipeline. So a pipeline
opens no file it does not need, and reads no byte of another's.
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
        """Records in the range."""
        return self.stop - self.start


def ranges_of(shards: Sequence[Shard], num_pipelines: int, pipeline: int) -> list[ShardRange]:
    """What one pipeline reads of the shards.

    Args:
        shards: all of them, in the same order on every pipeline.
        num_pipelines: number of pipelines that divide them.
        pipeline: which one, from 0.

    Returns:
        Disjoint ranges, none empty, whose union over all pipelines is every record, once.

    Raises:
        ValueError: `pipeline` is not one of `num_pipelines`.
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
    return [of_shard for of_shard in ranges if of_shard.num_records]


def policy(num_shards: int, num_pipelines: int) -> str:
    """How `ranges_of` divides, in a few words for a start-up table."""
    if num_pipelines == 1:
        return "none: one pipeline reads all"
    divided = num_shards % num_pipelines
    if divided == 0:
        return "by file"
    return "by record" if divided == num_shards else f"by file, {divided} files by record"


def _quotas(held: Sequence[int], rest: int) -> list[int]:
    """How many of `rest` records each gets, so that what all hold then differs least."""
    for num_filled in range(len(held), 0, -1):
        # Those who hold least are filled to one level; who already holds more gets nothing.
        filled = sorted(range(len(held)), key=lambda i: held[i])[:num_filled]
        level, extra = divmod(sum(held[i] for i in filled) + rest, num_filled)
        if level >= held[filled[-1]]:
            break
    quotas = [0] * len(held)
    for i in filled:
        quotas[i] = level - held[i]
    for i in sorted(filled)[:extra]:
        quotas[i] += 1
    return quotas


def _run(shards: Sequence[Shard], start: int, stop: int) -> list[ShardRange]:
    """Records `start` to `stop` of shards laid end to end."""
    ranges, begin = [], 0
    for shard in shards:
        end = begin + shard.num_records
        if begin < stop and start < end:
            ranges.append(ShardRange(shard, max(start - begin, 0), min(stop, end) - begin))
        begin = end
    return ranges
