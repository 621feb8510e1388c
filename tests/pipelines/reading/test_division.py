"""The division among pipelines is disjoint, complete and even."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.format.index import Shard
from pipelines.reading.blocks import divide_shards


def shards_of(counts: list[int]) -> list[Shard]:
    return [Shard(name=str(i), num_records=n, num_bytes=0, sha256="") for i, n in enumerate(counts)]


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 9))
def test_every_record_is_in_one_range(counts: list[int], num_pipelines: int) -> None:
    seen: Counter[tuple[str, int]] = Counter()
    for pipeline in range(num_pipelines):
        for shard_range in divide_shards(shards_of(counts), num_pipelines, pipeline):
            numbers = range(shard_range.start, shard_range.stop)
            assert 0 < shard_range.num_records == len(numbers) <= shard_range.shard.num_records
            seen.update((shard_range.shard.name, i) for i in numbers)
    expected = {(str(f), i) for f, count in enumerate(counts) for i in range(count)}
    assert set(seen) == expected
    assert all(count == 1 for count in seen.values())


@given(st.integers(0, 200), st.integers(1, 12), st.integers(1, 9))
def test_even_shards_are_divided_evenly(num_records: int, num_shards: int, workers: int) -> None:
    counts = [len(range(i, num_records, num_shards)) for i in range(num_shards)]
    held = [
        sum(
            shard_range.num_records
            for shard_range in divide_shards(shards_of(counts), workers, worker)
        )
        for worker in range(workers)
    ]
    assert max(held) - min(held) <= 1


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 9))
def test_divided_files_balance_uneven_pipelines(counts: list[int], workers: int) -> None:
    """Pipelines that get divided files hold at most one record more than the smallest."""
    shards = shards_of(counts)
    num_whole = len(counts) - len(counts) % workers
    whole = [sum(counts[worker:num_whole:workers]) for worker in range(workers)]
    held = [
        sum(shard_range.num_records for shard_range in divide_shards(shards, workers, worker))
        for worker in range(workers)
    ]
    for before, after in zip(whole, held, strict=True):
        assert after == before or after <= min(held) + 1


def test_invalid_pipeline_is_rejected() -> None:
    with pytest.raises(ValueError, match="pipeline: expected 0 to 1, got 2"):
        divide_shards([], 2, 2)
