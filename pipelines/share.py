"""Which records are whose: a disjoint, complete, even division of shards among input pipelines.

Files are dealt out whole while every pipeline gets equally many; the rest, fewer files than
pipelines, are read by all and divided record by record. So files cost no pipeline a byte it does
not need where there are enough of them, and no pipeline ends an epoch early where there are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipelines.index import Shard


class FileShare(NamedTuple):
    """Records `offset, offset + stride, ...` of one shard."""

    shard: Shard
    stride: int
    offset: int

    @property
    def num_records(self) -> int:
        """Records of this share."""
        return len(range(self.offset, self.shard.num_records, self.stride))


def share_of(shards: Sequence[Shard], num_pipelines: int, pipeline: int) -> list[FileShare]:
    """One pipeline's share of the shards.

    Args:
        shards: all of them, in the same order on every pipeline.
        num_pipelines: number of pipelines that divide them.
        pipeline: which one, from 0.

    Returns:
        Disjoint shares whose union over all pipelines is every record, once.

    Raises:
        ValueError: `pipeline` is not one of `num_pipelines`.
    """
    if not 0 <= pipeline < num_pipelines:
        raise ValueError(f"pipeline: expected 0 to {num_pipelines - 1}, got {pipeline}")
    num_whole = len(shards) - len(shards) % num_pipelines
    whole = [FileShare(shard, 1, 0) for shard in shards[pipeline:num_whole:num_pipelines]]
    # Record by record as if the files were one: starting anew in each would favour the first
    # pipelines. What `write_shards` wrote is divided so that shares differ by one record at most.
    divided, num_before = [], sum(shard.num_records for shard in shards[:num_whole])
    for shard in shards[num_whole:]:
        divided.append(FileShare(shard, num_pipelines, (pipeline - num_before) % num_pipelines))
        num_before += shard.num_records
    return whole + divided


def policy(num_shards: int, num_pipelines: int) -> str:
    """How `share_of` divides, in a few words for a start-up table."""
    if num_pipelines == 1:
        return "none: one pipeline reads all"
    divided = num_shards % num_pipelines
    if divided == 0:
        return "by file"
    return "by record" if divided == num_shards else f"by file, {divided} files by record"
