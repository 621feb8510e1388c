"""A folder of shards is complete or absent, despite kills and competing writers."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pipelines
from pipelines.format import offsets, record_file
from pipelines.format.index import check_shards
from pipelines.writing import ShardWriter
from tests.support import numbers
from tests.support.commands import require_obstore
from tests.support.starting import python

KILLED = """
import os, signal, sys
from tests.support import numbers
import pipelines

def examples():
    yield from numbers.examples(500)
    os.kill(os.getpid(), signal.SIGKILL)

pipelines.write_shards(examples(), sys.argv[1], numbers.FEATURES, num_shards=2, source="numbers")
"""


def never() -> Iterator[dict[str, object]]:
    raise AssertionError("the folder should have been re-used")
    yield


def test_index_describes_the_files(tmp_path: Path) -> None:
    index = numbers.write(tmp_path / "data", num_records=10, num_shards=3)
    assert pipelines.load_index(tmp_path / "data") == index
    assert index.num_records == 10
    assert [shard.num_records for shard in index.shards] == [4, 3, 3]
    check_shards(tmp_path / "data", index.shards, checksums=True)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_offsets_are_stored_with_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_obstore()
    # The first reader of a bucket would otherwise download all of it to find the records.
    monkeypatch.setattr(record_file, "offsets", lambda path: pytest.fail(f"scans {path}"))
    for place in (tmp_path / "data", "memory://bucket/written"):
        index = numbers.write(place, num_records=10, num_shards=3)
        assert len(offsets.load(place, index)) == 10


def test_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # without a name, as from `write`

    monkeypatch.setattr(ShardWriter, "write", full)
    with pytest.raises(pipelines.DataError, match=r"/data: No space left on device; free some"):
        numbers.write(tmp_path / "data", num_records=10, num_shards=3)
    assert not list(tmp_path.iterdir())


def test_folder_is_reused(tmp_path: Path) -> None:
    index = numbers.write(tmp_path, num_records=10, num_shards=3)
    again = pipelines.write_shards(
        never(), tmp_path, numbers.FEATURES, num_shards=3, source="numbers"
    )
    assert again == index


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_shards": 4}, "num_shards: expected 4, found 3"),
        ({"source": "letters"}, "source: expected letters, found numbers"),
        ({"features": numbers.FEATURES[:1]}, "features: expected"),
    ],
)
def test_folder_with_other_data_is_kept(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    numbers.write(tmp_path, num_records=10, num_shards=3)
    same = {"features": numbers.FEATURES, "num_shards": 3, "source": "numbers"}
    with pytest.raises(pipelines.DataError, match=f"contains other data: {message}"):
        pipelines.write_shards(never(), tmp_path, **(same | change))


def test_foreign_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(pipelines.DataError, match="choose another folder"):
        numbers.write(tmp_path, num_records=10, num_shards=3)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_interrupted_writing_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    def examples() -> Iterator[dict[str, object]]:
        yield from numbers.examples(5)
        raise failure

    with pytest.raises(failure):
        pipelines.write_shards(
            examples(), tmp_path / "data", numbers.FEATURES, num_shards=2, source="numbers"
        )
    assert list(tmp_path.iterdir()) == []


def test_next_writer_removes_the_folder_of_a_killed_one(tmp_path: Path) -> None:
    python("-c", KILLED, str(tmp_path / "data"), code=-signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    assert numbers.write(tmp_path / "data", num_records=10, num_shards=2).num_records == 10
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_racing_writers_agree(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def examples() -> Iterator[dict[str, object]]:
        barrier.wait(timeout=240)  # all have found no folder and begin to write
        yield from numbers.examples(50)

    def write(_: int) -> pipelines.Index:
        return pipelines.write_shards(
            examples(), tmp_path / "data", numbers.FEATURES, num_shards=2, source="numbers"
        )

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(write, range(4))
    assert others == [first] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_zero_shards_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_shards: expected at least 1, got 0"):
        numbers.write(tmp_path / "data", num_records=1, num_shards=0)
