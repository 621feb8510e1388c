"""Folders in object stores are read like local folders: order, resuming, damage, faults."""

from __future__ import annotations

import itertools
import logging
import mmap
import platform
import re
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import pipelines
from pipelines import object_store, storage
from pipelines.check import main as check
from pipelines.format import record_file
from pipelines.show import main as show
from pipelines.verify import main as verify
from tests.support import buckets, numbers
from tests.support.commands import require_obstore

_numbers_of_folders = itertools.count()


@pytest.fixture(scope="module")
def proxy(s3_server: str) -> Iterator[buckets.Proxy]:
    """A proxy before an S3 server that has the bucket `bucket`."""
    buckets.create_bucket(s3_server, "bucket")
    with pytest.MonkeyPatch.context() as patch, buckets.through_proxy(s3_server, patch) as proxy:
        yield proxy


@pytest.fixture(params=["memory", "s3"])
def root(request: pytest.FixtureRequest) -> str:
    """The URL of a folder that does not exist yet."""
    require_obstore()
    if request.param == "s3":
        request.getfixturevalue("proxy").fault = lambda method, path: ""
    return f"{request.param}://bucket/folder-{next(_numbers_of_folders)}"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A local folder with an index and offsets."""
    folder = tmp_path / "local"
    numbers.write(folder, num_records=1000, num_shards=5)
    pipelines.read(folder, 10)
    return folder


def in_epochs(dataset: tf.data.Dataset) -> list[list[int]]:
    return [numbers.order(dataset) for _ in range(2)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle_buffer": 100, "seed": 3, "start": pipelines.Position(1, 4)},
        {"shuffle_buffer": 60, "seed": 3, "context": tf.distribute.InputContext(3, 1, 3)},
        {"shuffle_buffer": 60, "seed": 3, "cache": "memory"},
        {
            "shuffle_buffer": 60,
            "seed": 3,
            "tuning": pipelines.Tuning(read_ahead_bytes=4096, num_prefetched=1),
        },
    ],
    ids=["in-order", "resumed", "one-of-three", "cached", "little-memory"],
)
def test_order_equals_that_of_local_files(root: str, local: Path, options: dict[str, Any]) -> None:
    buckets.upload(local, root)
    expected = in_epochs(pipelines.read(local, 21, **options))
    assert in_epochs(pipelines.read(root, 21, **options)) == expected


def test_mixture_equals_that_of_local_files(local: Path) -> None:
    require_obstore()
    root = f"memory://bucket/folder-{next(_numbers_of_folders)}"
    buckets.upload(local, root)

    def mixed(folder: str | Path) -> list[list[int]]:
        sources = [pipelines.Source(folder, 0.7), pipelines.Source(folder, 0.3)]
        return in_epochs(pipelines.mix(sources, 10, num_batches=9, seed=1, shuffle_buffer=20))

    assert mixed(root) == mixed(local)


def test_offsets_are_created_where_they_are_missing(root: str, local: Path) -> None:
    (local / "offsets.npz").unlink()
    buckets.upload(local, root)
    assert sorted(numbers.order(pipelines.read(root, 10))) == list(range(1000))
    assert "offsets.npz" in storage.RemotePath(root).sizes()


def test_only_what_is_needed_is_fetched(proxy: buckets.Proxy, local: Path) -> None:
    """Resuming near the end fetches one merged range, not the files before."""
    url = f"s3://bucket/folder-{next(_numbers_of_folders)}"
    buckets.upload(local, url)
    dataset = pipelines.read(url, 10, start=pipelines.Position(0, 99))
    fetched: list[str] = []
    proxy.fault = lambda method, path: fetched.append(path) or ""  # type: ignore[func-returns-value]
    assert len(numbers.order(dataset)) == 10
    assert [path.rpartition("/")[2] for path in fetched] == ["data-00004-of-00005.tfrecord"]


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compressed_remote_shards_are_read_in_the_local_order(
    root: str, local: Path, compression: str
) -> None:
    numbers.compress(local, compression)
    buckets.upload(local, root)
    options: dict[str, Any] = {"shuffle_buffer": 60, "seed": 1, "start": pipelines.Position(0, 7)}
    expected = in_epochs(pipelines.read(local, 21, **options))
    assert in_epochs(pipelines.read(root, 21, **options)) == expected


def damage(folder: Path) -> str:
    """Flips a bit in two records of shard 2, and returns the name and place of the first."""
    path = folder / "data-00002-of-00005.tfrecord"
    begins, data = list(record_file.offsets(path)), bytearray(path.read_bytes())
    for record in (7, 8):
        data[begins[record] + 20] ^= 16
    path.write_bytes(data)
    return f"{path.name}: record at byte {begins[7]}: checksum of its "


def test_damage_is_named(root: str, local: Path) -> None:
    named = damage(local)
    buckets.upload(local, root)
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(f"{root}/{named}")):
        numbers.order(pipelines.read(root, 10))
    assert verify([root, "--num-workers", "1"]) == 1


def test_damage_is_skipped(root: str, local: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(local)
    buckets.upload(local, root)
    dataset = pipelines.read(root, 10, shuffle_buffer=50, seed=1, on_corrupt="skip")
    with caplog.at_level(logging.WARNING, "pipelines"):
        assert sorted(set(range(1000)) - set(numbers.order(dataset))) == [37, 42]
    assert caplog.messages[-1].endswith("skipped, 2 so far")


def test_lost_connection_skips_no_records(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block with a corrupt record is read again, and that fails."""
    require_obstore()
    root = f"memory://bucket/folder-{next(_numbers_of_folders)}"
    damage(local)
    buckets.upload(local, root)

    def fail(*_: object) -> None:
        raise object_store.TransferError("connection lost")

    dataset = pipelines.read(root, 10, on_corrupt="skip")
    monkeypatch.setattr(storage._Reader, "readinto", fail)
    with pytest.raises(tf.errors.InvalidArgumentError, match="connection lost"):
        numbers.order(dataset)


def test_missing_files_are_named(root: str, local: Path) -> None:
    with pytest.raises(pipelines.DataError, match=f"{root}/index.json: expected the index"):
        pipelines.read(root, 10)
    buckets.upload(local, root)
    lost = storage.RemotePath(root) / "data-00003-of-00005.tfrecord"
    dataset = pipelines.read(root, 10)
    lost.unlink()
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{lost}: the file is missing"):
        numbers.order(dataset)
    with pytest.raises(pipelines.DataError, match=f"{lost}: .* the file is missing"):
        pipelines.read(root, 10)


def test_data_service_refuses_urls(root: str, local: Path) -> None:
    buckets.upload(local, root)
    with pytest.raises(ValueError, match="data_service: expected a local folder"):
        pipelines.read(root, 10, data_service="grpc://localhost:1")


def test_commands_accept_urls(
    root: str, local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buckets.upload(local, root)
    assert verify([root, "--num-workers", "1"]) == 0
    assert show([root, "--to", str(tmp_path / "sheet.png")]) == 0
    assert check([root, "--num-workers", "2"]) == 0
    assert "Each of 1,000 records was read exactly once" in capsys.readouterr().out


def every(numbers_of_faults: dict[int, buckets.Fault]) -> Callable[[str, str], buckets.Fault]:
    """Returns a function that breaks the requests of shards with these numbers."""
    count = itertools.count()
    return lambda method, path: (
        numbers_of_faults.get(next(count), "") if method == "GET" and "tfrecord" in path else ""
    )


@pytest.mark.usefixtures("proxy")
def test_faults_of_the_network_change_nothing(
    s3_server: str, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://bucket/folder-{next(_numbers_of_folders)}"
    expected = numbers.order(pipelines.read(local, 10, shuffle_buffer=300, seed=2))
    with buckets.through_proxy(s3_server, monkeypatch, read_timeout="1s") as proxy:
        buckets.upload(local, url)
        dataset = pipelines.read(url, 10, shuffle_buffer=300, seed=2)
        proxy.fault = every({0: "503", 1: "cut", 2: "503", 4: "stall", 5: "cut"})
        assert numbers.order(dataset) == expected


def test_denied_permission_is_one_line(proxy: buckets.Proxy, local: Path) -> None:
    proxy.fault = lambda method, path: "403"
    with pytest.raises(pipelines.DataError, match="permission denied") as error:
        pipelines.read("s3://bucket/secret", 10)
    assert "s3://bucket/secret/index.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_offsets_that_cannot_be_read_do_not_cause_a_scan(proxy: buckets.Proxy, local: Path) -> None:
    """It would read all shards, and then fail or hide the problem."""
    url = f"s3://bucket/folder-{next(_numbers_of_folders)}"
    proxy.fault = lambda method, path: ""
    buckets.upload(local, url)
    proxy.fault = lambda method, path: "403" if "offsets" in path else ""
    with pytest.raises(pipelines.DataError, match=r"offsets\.npz: permission denied"):
        pipelines.read(url, 10)


def test_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(pipelines.DataError, match=r"pip install obstore"):
        pipelines.read("s3://bucket/anything", 10)


def test_environment_variables_set_cache_and_read_ahead(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the cache is used, and serves the second epoch without the bucket."""
    require_obstore()
    url = storage.RemotePath(f"memory://bucket/folder-{next(_numbers_of_folders)}")
    buckets.upload(local, str(url))
    monkeypatch.setenv("PIPELINES_CACHE_DIR", str(tmp_path / "cache"))
    dataset = pipelines.read(url, 10, shuffle_buffer=50, seed=1)
    first = numbers.order(dataset)
    for name in url.sizes():
        (url / name).unlink()
    assert sorted(numbers.order(dataset)) == sorted(first)
    monkeypatch.setenv("PIPELINES_READ_AHEAD", "much")
    buckets.upload(local, str(url))
    with pytest.raises(pipelines.DataError, match="PIPELINES_READ_AHEAD: expected a size such as"):
        pipelines.read(url, 10)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="page faults depend on malloc")
def test_memory_of_large_buffers_is_reused(local: Path) -> None:
    require_obstore()
    root = f"memory://bucket/folder-{next(_numbers_of_folders)}"
    buckets.upload(local, root)
    numbers.order(pipelines.read(root, 10))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        np.ones(1 << 20, np.uint8)
    num_pages = 50 * (1 << 20) // mmap.PAGESIZE
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < num_pages / 4


def test_local_urls_are_read_like_paths(local: Path) -> None:
    assert numbers.order(pipelines.read(f"file://{local}", 10)) == numbers.order(
        pipelines.read(local, 10)
    )
