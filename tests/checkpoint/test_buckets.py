"""Checkpoints in a bucket: complete ones only, whatever fails; and a lock that two runs respect."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import pipelines
from pipelines.check import main as check
from pipelines.pack.__main__ import main as pack
from pipelines.storage import ChangedError, RemotePath
from pipelines.verify import main as verify
from tests.checkpoint.training import repeatable, weights_after
from tests.support import buckets
from tests.support.buckets import Fault, Proxy
from tests.support.training import X, Y
from tfdist.checkpoint import lock as lock_module
from tfdist.checkpoint import manifest
from tfdist.checkpoint.lock import BucketLock, lock_of
from tfdist.checkpoint.snapshot import Packed, Snapshot
from tfdist.checkpoint.store import Place, checkpoints_of, load, store_at
from tfdist.console import folders
from tfdist.errors import ConfigurationError

ROWS = 300_000  # of a variable; several parts of an upload


@pytest.fixture
def url(bucket: str) -> str:
    return f"{bucket}/run/checkpoints"


def packed(number: int) -> Packed:
    """Returns a snapshot whose values identify it."""
    values = np.full((ROWS, 8), number, np.float32)
    return Snapshot({"model/00000": values}, {"model/00000": "w"}, {"number": number}).packed()


def number_of(checkpoint: Packed) -> float:
    values = checkpoint.arrays["model/00000"]
    assert values.shape == (ROWS, 8)
    assert values.min() == values.max()
    return float(values[0, 0])


def fail_lines(line: str) -> None:
    pytest.fail(line)


def test_store_keeps_the_newest_and_the_best(url: str, tmp_path: Path) -> None:
    store = store_at(url)
    places = [Place(step, step) for step in (1, 2, 3)]
    for place in places:
        store.write(place, packed(place.step), {"ended": False})
        store.keep(1, places[0])
    assert store.places() == [places[2], places[0]]
    found = store_at(url).load_newest(fail_lines)
    assert found is not None
    assert number_of(found[1]) == 3
    assert checkpoints_of(url.removesuffix("/checkpoints")) == [
        store.path(places[2]),
        store.path(places[0]),
    ]
    store.finish()
    assert not any((tmp_path / "cache").rglob("variables*"))  # the local disk is left as it was


def test_checkpoint_without_a_manifest_is_none(url: str) -> None:
    store = store_at(url)
    store.write(Place(1, 1), packed(1), {})
    store.write(Place(2, 2), packed(2), {})
    root = buckets.remote(url)
    (root / Place(2, 2).name / manifest.NAME).unlink()
    assert store.places() == [Place(1, 1)]
    store.clean()
    assert {name.partition("/")[0] for name in root.sizes()} == {Place(1, 1).name}


def test_damaged_checkpoint_is_skipped_and_set_aside(url: str) -> None:
    store = store_at(url)
    for step in (1, 2):
        store.write(Place(step, step), packed(step), {})
    (buckets.remote(url) / Place(2, 2).name / "state.json").write_bytes(b"{}")
    lines: list[str] = []
    found = store.load_newest(lines.append)
    assert found is not None
    assert number_of(found[1]) == 1
    assert f"{url}/{Place(2, 2).name}/state.json" in lines[0]
    store.set_aside([Place(2, 2)])
    assert store.places() == [Place(1, 1)]
    assert any(name.startswith("damaged-") for name in buckets.remote(url).sizes())


@pytest.mark.parametrize("fault", ["503", "500", "cut"])
def test_failing_requests_are_repeated(url: str, proxy: Proxy, fault: Fault) -> None:
    number = iter(range(1_000_000))
    proxy.fault = lambda method, path: fault if next(number) % 5 == 0 else ""
    store = store_at(url)
    for step in (1, 2):
        store.write(Place(step, step), packed(step), {})
        store.keep(1, None)
    store.finish()
    assert number_of(load(store.path(Place(2, 2)))) == 2
    assert store.places() == [Place(2, 2)]


def test_upload_that_fails_is_completed_at_the_end(url: str, proxy: Proxy) -> None:
    store = store_at(url)
    store.write(Place(1, 1), packed(1), {})
    proxy.fault = lambda method, path: "403" if method in ("PUT", "POST") else ""
    with pytest.raises(OSError, match="permission denied"):
        store.write(Place(2, 2), packed(2), {})
    assert store.places() == [Place(1, 1)]
    proxy.fault = lambda method, path: ""
    store.finish()
    assert number_of(load(store.path(Place(2, 2)))) == 2


def test_last_checkpoint_that_cannot_be_uploaded_ends_the_training_with_an_error(
    url: str, proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_upload(method: str, path: str) -> Fault:
        return "403" if method in ("PUT", "POST") and "state.json" in path else ""

    proxy.fault = is_upload
    with pytest.raises(ConfigurationError, match="last checkpoint could not be uploaded") as raised:
        repeatable(url).fit(X, Y, epochs=2, verbose=0)
    assert "Could not write a checkpoint" in capsys.readouterr().err
    (kept,) = folders.not_uploaded_folder(url).iterdir()
    assert str(kept) in str(raised.value)
    load(str(kept))
    assert not BucketLock(url).is_held()


def test_runs_with_similar_names_have_different_staging_folders() -> None:
    """One of them would remove the files of the other."""
    names = ["run_1", "run 1", "run#1", "run/1", "..", "_"]
    assert len({folders.staging_folder(f"s3://bucket/{name}") for name in names}) == len(names)


def test_fit_resumes_from_a_bucket(url: str, tmp_path: Path) -> None:
    np.testing.assert_equal(weights_after([1, 3], url), weights_after([3], tmp_path / "a"))
    with pytest.raises(ConfigurationError, match="already has checkpoints"):
        repeatable(url, resume="never").fit(X, Y, epochs=1, verbose=0)


def test_lock_is_held_by_one_run(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_BUCKET_HEARTBEAT_SECONDS", 0.1)
    first, second = lock_of(url), lock_of(url)
    first.acquire()
    assert second.is_held()
    with pytest.raises(ConfigurationError, match=r"in use by another run: process \d+ on host"):
        second.acquire()
    first.check()
    first.release()
    second.acquire()
    second.release()
    assert not second.is_held()


@pytest.mark.parametrize("difference", [-300.0, 300.0])
def test_clocks_that_differ_do_not_change_whether_a_lock_is_held(
    url: str, monkeypatch: pytest.MonkeyPatch, difference: float
) -> None:
    monkeypatch.setattr(lock_module, "_BUCKET_HEARTBEAT_SECONDS", 1000.0)
    holder, other = BucketLock(url), BucketLock(url)
    holder.acquire()
    clock = SimpleNamespace(time=lambda: time.time() + difference)
    monkeypatch.setattr(lock_module, "time", clock)
    clock.sleep = lambda _: holder._try_to_refresh()
    assert other.is_held()
    clock.sleep = lambda _: None  # the holder was killed
    assert not other.is_held()
    holder.release()


def test_lock_of_a_run_that_stopped_is_replaced_and_the_old_owner_notices(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_BUCKET_HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(lock_module, "_BUCKET_LEASE_SECONDS", 0.5)
    suspended = BucketLock(url)
    resumed = threading.Event()
    refresh = suspended._refresh

    def refresh_later() -> None:
        resumed.wait(60)
        refresh()

    monkeypatch.setattr(suspended, "_refresh", refresh_later)
    suspended.acquire()
    second = lock_of(url)
    second.acquire()
    resumed.set()
    assert suspended._thread is not None
    suspended._thread.join(60)
    with pytest.raises(ConfigurationError, match="lost its lock"):
        suspended.check()
    suspended.release()
    second.check()
    monkeypatch.setattr(
        lock_module, "_BUCKET_LEASE_SECONDS", 60.0
    )  # the server counts whole seconds
    assert BucketLock(url).is_held()  # still that of the second
    second.release()


def test_run_that_was_suspended_notices_before_its_next_write(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not wait for the next time at which it refreshes the lock."""
    monkeypatch.setattr(lock_module, "_BUCKET_HEARTBEAT_SECONDS", 100.0)
    suspended = lock_of(url)
    suspended.acquire()
    monkeypatch.setattr(lock_module, "_BUCKET_HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(lock_module, "_BUCKET_LEASE_SECONDS", 0.5)
    second = lock_of(url)
    second.acquire()
    with pytest.raises(ConfigurationError, match="lost its lock"):
        suspended.check()
    suspended.release()
    second.check()
    second.release()


def test_lock_of_a_killed_process_of_this_host_is_replaced_at_once(url: str) -> None:
    lock = BucketLock(url)
    lock.acquire()
    content = lock._content().replace(b'"started"', b'"started before"')
    lock._identity = lock._path.replace(content, lock._identity)
    other = BucketLock(url)
    other.acquire()
    other.check()
    other.release()
    lock.release()


def test_server_that_ignores_conditions_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RemotePath.write_bytes

    def unconditional(path: RemotePath, data: bytes, *, overwrite: bool = True) -> dict[str, str]:
        return write(path, data)

    monkeypatch.setattr(RemotePath, "write_bytes", unconditional)
    with pytest.raises(ConfigurationError, match="ignores conditions of writes"):
        lock_of(url).acquire()
    assert not buckets.remote(url).sizes()


# ---- clouds ----


@pytest.fixture(params=["gs", "az"])
def root(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of an empty bucket."""
    buckets.require_s3()
    program = {"gs": "moto", "az": "azurite-blob"}[request.param]
    if program != "moto":
        buckets.require(program)
    create = {"gs": buckets.create_bucket, "az": buckets.create_container}[request.param]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with (
        buckets.running(program, tmp_path / "server") as server,
        buckets.through_proxy(server.address, monkeypatch),
    ):
        create(server.address, "bucket")
        yield f"{request.param}://bucket"


def test_pack_read_checkpoint_and_resume(root: str, tmp_path: Path) -> None:
    """Equal to local folders, also if the first checkpoint was written by another process."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}\n" for i in range(100)))
    options = ["--num-shards", "3", "--num-workers", "1"]
    assert pack([str(text), str(tmp_path / "packed"), *options]) == 0
    for part in ("2/2", "1/2"):
        assert pack([str(text), f"{root}/packed", *options, "--part", part]) == 0
    assert pipelines.load_index(f"{root}/packed") == pipelines.load_index(tmp_path / "packed")
    assert verify([f"{root}/packed", "--num-workers", "1"]) == 0
    assert check([f"{root}/packed", "--num-workers", "2"]) == 0

    result = weights_after([1, 3], f"{root}/run")
    np.testing.assert_equal(result, weights_after([3], tmp_path / "run"))


def test_conditional_writes_and_locks(root: str) -> None:
    path = buckets.remote(f"{root}/a")
    first = path.write_bytes(b"1", overwrite=False)
    with pytest.raises(FileExistsError):
        path.write_bytes(b"2", overwrite=False)
    path.replace(b"3", first)
    with pytest.raises(ChangedError):
        path.replace(b"4", first)
    assert path.read_bytes() == b"3"
    lock = lock_of(f"{root}/run")
    lock.acquire()
    assert lock_of(f"{root}/run").is_held()
    lock.release()
    assert not lock_of(f"{root}/run").is_held()
