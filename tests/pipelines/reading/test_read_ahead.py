"""Ranges are yielded in order, within a memory limit, and merged with their neighbors."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import DataError
from pipelines.reading.read_ahead import FIRST_REQUESTS, Range, cache_ranges, read_ahead

CONTENTS = {name: bytes((ord(name) + i) % 251 for i in range(3000)) for name in "ab"}


def fetch(wanted: Range) -> bytes:
    return CONTENTS[wanted.path][wanted.begin : wanted.end]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 29)), unique=True),
    st.integers(1, 5000),
    st.booleans(),
)
def test_ranges_are_yielded_in_order(
    places: list[tuple[str, int]], limit: int, merge: bool
) -> None:
    ranges = [Range(name, 100 * i, 100 * i + 100) for name, i in places]
    assert list(read_ahead(ranges, fetch, limit, merge=merge)) == [fetch(r) for r in ranges]


def test_memory_is_bounded() -> None:
    """Nothing is fetched beyond the limit until earlier bytes were used, which make room."""
    lock, started = threading.Lock(), []
    together = threading.Barrier(2, timeout=30)

    def counted(wanted: Range) -> bytes:
        with lock:
            started.append(wanted)
        if wanted in ranges[-2:]:
            together.wait()
        return bytes(wanted.end - wanted.begin)

    ranges = [Range("a", 1000 * i, 1000 * i + 10) for i in range(100)]
    used = 0
    for data in read_ahead(ranges, counted, 50, merge=False):
        used += len(data)
        assert sum(r.end - r.begin for r in started) <= used + 50
    assert len(started) == 100


def test_few_requests_share_the_bandwidth_at_first() -> None:
    started: list[Range] = []
    num_started: list[int] = []
    all_first = threading.Barrier(FIRST_REQUESTS, lambda: num_started.append(len(started)), 30)

    def counted(wanted: Range) -> bytes:
        started.append(wanted)
        if wanted in ranges[:FIRST_REQUESTS]:
            all_first.wait()
        return fetch(wanted)

    ranges = [Range("a", 10 * i, 10 * i + 10) for i in range(100)]
    assert list(read_ahead(ranges, counted, 10_000, merge=False)) == [fetch(r) for r in ranges]
    assert num_started == [FIRST_REQUESTS]


def counting(fetched: list[Range]) -> Callable[[Range], bytes]:
    """Returns a function that fetches ranges, and lists them."""
    return lambda wanted: fetched.append(wanted) or fetch(wanted)  # type: ignore[func-returns-value]


def test_neighbors_are_merged() -> None:
    fetched: list[Range] = []
    ranges = [Range("a", 100 * i, 100 * i + 100) for i in (2, 0, 1, 3)]
    list(read_ahead(ranges, counting(fetched), 10_000))
    assert fetched == [Range("a", 0, 400)]


def test_error_is_raised_at_its_range() -> None:
    def broken(wanted: Range) -> bytes:
        if wanted.begin == 200:
            raise OSError("broken")
        return fetch(wanted)

    ranges = [Range("a", 100 * i, 100 * i + 100) for i in range(4)]
    fetched = read_ahead(ranges, broken, 10_000, merge=False)
    assert [next(fetched), next(fetched)] == [fetch(one) for one in ranges[:2]]
    with pytest.raises(OSError, match="broken"):
        next(fetched)


def test_cache_returns_fetched_ranges(tmp_path: Path) -> None:
    fetched: list[Range] = []
    counted = counting(fetched)
    one, other = Range("a", 0, 1000), Range("a", 1000, 2000)
    cached = cache_ranges(counted, tmp_path, 10_000, {"a": "version 1"})
    assert [cached(one), cached(one), cached(other)] == [fetch(one), fetch(one), fetch(other)]
    again = cache_ranges(counted, tmp_path, 10_000, {"a": "version 1"})
    assert again(one) == fetch(one)
    assert fetched == [one, other]
    cache_ranges(counted, tmp_path, 10_000, {"a": "version 2"})(one)
    assert fetched == [one, other, one]


def test_cache_keeps_recently_used_ranges_within_its_limit(tmp_path: Path) -> None:
    cached = cache_ranges(fetch, tmp_path, 1000, {})
    for i in range(25):
        cached(Range("a", 100 * i, 100 * i + 100))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    assert list(tmp_path.iterdir())


def test_folder_of_a_cache_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file: the folder of the cache cannot be created"):
        cache_ranges(fetch, tmp_path / "file", 1000, {})


def test_other_files_in_the_folder_of_a_cache_are_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_bytes(bytes(2000))
    cached = cache_ranges(fetch, tmp_path, 1000, {})
    for i in range(15):
        cached(Range("a", 100 * i, 100 * i + 100))
    assert (tmp_path / "thesis.txt").exists()
    assert 0 < sum(path.stat().st_size for path in tmp_path.iterdir()) - 2000 <= 1000


def test_truncated_file_of_the_cache_is_fetched_again(tmp_path: Path) -> None:
    wanted = Range("a", 0, 1000)
    cache_ranges(fetch, tmp_path, 10_000, {})(wanted)
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"short")
    assert cache_ranges(fetch, tmp_path, 10_000, {})(wanted) == fetch(wanted)


def _read_through(folder: str, seed: int, limit: int) -> int:
    """Reads all ranges twice through a cache, in a random order, and counts wrong results."""
    ranges = [Range("a", 100 * i, 100 * i + 100) for i in range(30)] * 2
    random.Random(seed).shuffle(ranges)
    cached = cache_ranges(fetch, folder, limit, {"a": "version 1"})
    return sum(cached(one) != fetch(one) for one in ranges * 10)


def test_two_processes_share_a_cache(tmp_path: Path) -> None:
    limit = 2000  # less than they read: both keep writing and removing files
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        calls = [(str(tmp_path), seed, limit) for seed in (1, 2)]
        assert pool.starmap(_read_through, calls) == [0, 0]
    cache_ranges(fetch, tmp_path, limit, {})(
        Range("b", 0, 100)
    )  # removes old files at its first write
    names = [path.name for path in tmp_path.iterdir()]
    assert not any(name.startswith(".") for name in names)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit


def test_cache_on_a_disk_that_is_full_within_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partial file of a range is removed, and earlier ranges stay."""
    write = Path.write_bytes

    def half(path: Path, data: bytes) -> None:
        write(path, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    first, second = Range("a", 0, 1000), Range("a", 1000, 2000)
    cached = cache_ranges(fetch, tmp_path, 10_000, {})
    cached(first)
    monkeypatch.setattr(Path, "write_bytes", half)
    assert cached(second) == fetch(second)
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == fetch(first)
