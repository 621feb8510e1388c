"""Paths in object stores: names, errors and transfers that end early."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines import DataError, object_store, storage
from pipelines.pack.__main__ import main as pack
from pipelines.storage import RemotePath
from pipelines.writing import ShardWriter
from tests.support import buckets
from tests.support.commands import require_obstore

require_obstore()
_numbers_of_folders = itertools.count()


@pytest.fixture
def folder() -> RemotePath:
    return RemotePath(f"memory://bucket/storage-{next(_numbers_of_folders)}")


@pytest.fixture(scope="module")
def proxy(s3_server: str) -> Iterator[buckets.Proxy]:
    """A proxy before an S3 server that has the bucket `names`."""
    buckets.create_bucket(s3_server, "names")
    with pytest.MonkeyPatch.context() as patch, buckets.through_proxy(s3_server, patch) as proxy:
        yield proxy


def test_failed_shard_leaves_the_former_object(folder: RemotePath) -> None:
    """Otherwise a part that runs twice could replace a published shard by a partial one."""
    (folder / "b").write_bytes(b"complete")
    for name in "ab":
        with contextlib.suppress(InterruptedError), ShardWriter(folder / name) as writer:
            writer.write(b"partial")
            raise InterruptedError
    assert folder.sizes() == {"b": 8}


def test_uploads_at_the_same_time_have_small_parts(
    proxy: buckets.Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the memory of `write_shards` is 10 MB and more for each shard."""
    paths: list[str] = []
    monkeypatch.setattr(proxy, "fault", lambda method, path: paths.append(path) or "")
    writers = [ShardWriter(RemotePath(f"s3://names/{i}"), num_open=5) for i in range(5)]
    with contextlib.ExitStack() as stack:
        for writer in writers:
            stack.enter_context(writer).write(bytes(6 << 20))
    assert len([path for path in paths if "partNumber=1" in path]) == 5


@pytest.mark.parametrize("name", ["a#1", "what?", "a%20b", "a b", "日本", "100%", "+*[1]{2}"])
def test_names_of_objects_are_what_a_listing_returns(folder: RemotePath, name: str) -> None:
    (folder / name).write_bytes(name.encode())
    assert folder.sizes() == {name: len(name.encode())}
    assert (folder / name).read_bytes() == name.encode()


def test_object_that_stands_for_the_folder_is_no_file(proxy: buckets.Proxy) -> None:
    """The console of AWS creates one for each folder."""
    request = urllib.request.Request(f"{proxy.address}/names/new/", b"", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
    assert RemotePath("s3://names/new").sizes() == {}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "expected a bucket, as in s3://bucket/folder"),
        ("s3://names/a//b", "a//b: .* empty path segment"),
        ("s3://names/../b", 'illegal character sequence ".."'),
        ("s3://No Bucket/a", "s3://No Bucket: invalid domain character"),
        ("s3://missing/a", "s3://missing/a/?.*: there is no such bucket; create it"),
        ("S3://names/a", "expected a local path, s3://, gs:// or az://"),
        ("s3:/names/a", "or a URL such as s3://names/a"),
        ("file://data/a", "expected an absolute path, as in file:///data/images"),
    ],
)
def test_url_that_cannot_be_used_is_one_line(
    proxy: buckets.Proxy, url: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=message):
        storage.at(url).read_bytes()
    assert pack([url, "memory://bucket/packed"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_reason_of_the_server_is_named(proxy: buckets.Proxy) -> None:
    (RemotePath("s3://names") / "object").write_bytes(b"1")
    with pytest.raises(DataError, match=r"416 .*: InvalidRange: The requested range"):
        RemotePath("s3://names/object").read_range(5, 9)


def test_listing_that_is_denied_names_the_permission(proxy: buckets.Proxy) -> None:
    proxy.fault = lambda method, path: "403"
    try:
        with pytest.raises(DataError, match=r"permission denied .* grant them s3:ListBucket"):
            RemotePath("s3://names/folder").sizes()
    finally:
        proxy.fault = lambda method, path: ""


def test_server_that_cannot_be_reached_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in buckets.endpoints("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(object_store.RETRY, "max_retries", 0)
    with pytest.raises(DataError, match="no answer; check the connection and endpoint"):
        RemotePath("s3://unreachable/object").read_bytes()


def test_missing_credentials_and_profiles_are_named(
    proxy: buckets.Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = object_store.library().exceptions.GenericError("PUT http://169.254.169.254/latest")
    with (
        pytest.raises(DataError, match="found no credentials; set AWS_ACCESS_KEY_ID"),
        object_store.translated("s3://a/b"),
    ):
        raise error
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_PROFILE", "unknown")
    with pytest.raises(DataError, match=r"^AWS_PROFILE=unknown: The config profile"):
        RemotePath("s3://other/object").read_bytes()


@pytest.mark.parametrize("method", ["upload", "write_bytes", "open"])
def test_slow_upload_is_no_stalled_connection(
    proxy: buckets.Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Each request takes longer than `read_timeout` allows for an answer."""
    monkeypatch.setitem(object_store.CLIENT_OPTIONS, "read_timeout", "0.2s")
    monkeypatch.setitem(object_store.RETRY, "max_retries", 0)
    object_store.store_of.cache_clear()
    data, path = bytes(2 << 20), RemotePath(f"s3://names/{method}")
    (tmp_path / "file").write_bytes(data)
    proxy.delay = 0.4
    if method == "upload":
        path.upload(tmp_path / "file")
    elif method == "write_bytes":
        path.write_bytes(data)
    else:
        with path.open("wb") as file:
            file.write(data)
    proxy.delay = 0.0
    assert path.num_bytes() == len(data)


def stream(path: RemotePath) -> None:
    with path.open("wb") as file:
        for _ in range(2):
            file.write(bytes(11 << 20))


@pytest.mark.parametrize("transfer", [RemotePath.read_bytes, stream])
def test_interrupt_ends_the_wait_for_a_stalled_server(
    proxy: buckets.Proxy, monkeypatch: pytest.MonkeyPatch, transfer: Callable[[RemotePath], object]
) -> None:
    for options in (object_store.CLIENT_OPTIONS, object_store.UPLOAD_OPTIONS):
        monkeypatch.setitem(options, "read_timeout", "20s")
    object_store.store_of.cache_clear()

    def stall(method: str, path: str) -> buckets.Fault:
        os.kill(os.getpid(), signal.SIGINT)
        proxy.fault = lambda method, path: "stall"
        return "stall"

    monkeypatch.setattr(proxy, "fault", stall)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        transfer(RemotePath("s3://names/object"))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
@pytest.mark.parametrize("address", ["", "localhost:9000"])
def test_address_of_a_server_that_is_no_url_is_named(
    name: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, address)
    with pytest.raises(DataError, match=f"{name}='{address}': expected a URL such as"):
        storage.RemotePath("s3://bucket-of-no-server/file").read_bytes()
