"""Checkpoints in a bucket: complete ones only, whatever fails; and a lock that two runs respect."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipelines.storage import RemotePath
from tests.checkpoint.training import repeatable, weights_after
from tests.support import buckets
from tests.support.buckets import Fault, Proxy
from tests.support.training import X, Y
from tfdist.checkpoint import bucket_lock, manifest
from tfdist.checkpoint.bucket_store import checkpoints_of, store_at
from tfdist.checkpoint.lock import lock_of
from tfdist.checkpoint.snapshot import Packed, Snapshot
from tfdist.checkpoint.store import Place, load
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
    assert not bucket_lock.BucketLock(url).is_held()


def test_runs_with_similar_names_have_different_staging_folders() -> None:
    """One of them would remove the files of the other."""
    names = ["run_1", "run 1", "run#1", "run/1", "..", "_"]
    assert len({folders.staging_folder(f"s3://bucket/{name}") for name in names}) == len(names)


def test_fit_resumes_from_a_bucket(url: str, tmp_path: Path) -> None:
    np.testing.assert_equal(weights_after([1, 3], url), weights_after([3], tmp_path / "a"))
    with pytest.raises(ConfigurationError, match="already has checkpoints"):
        repeatable(url, resume="never").fit(X, Y, epochs=1, verbose=0)


def test_lock_is_held_by_one_run(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_lock, "_HEARTBEAT_SECONDS", 0.1)
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
    monkeypatch.setattr(bucket_lock, "_HEARTBEAT_SECONDS", 1000.0)
    holder, other = bucket_lock.BucketLock(url), bucket_lock.BucketLock(url)
    holder.acquire()
    clock = SimpleNamespace(time=lambda: time.time() + difference)
    monkeypatch.setattr(bucket_lock, "time", clock)
    clock.sleep = lambda _: holder._try_to_refresh()
    assert other.is_held()
    clock.sleep = lambda _: None  # the holder was killed
    assert not other.is_held()
    holder.release()


def test_lock_of_a_run_that_stopped_is_replaced_and_the_old_owner_notices(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_lock, "_HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(bucket_lock, "_LEASE_SECONDS", 0.5)
    suspended = bucket_lock.BucketLock(url)
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
    monkeypatch.setattr(bucket_lock, "_LEASE_SECONDS", 60.0)  # the server counts whole seconds
    assert bucket_lock.BucketLock(url).is_held()  # still that of the second
    second.release()


def test_run_that_was_suspended_notices_before_its_next_write(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not wait for the next time at which it refreshes the lock."""
    monkeypatch.setattr(bucket_lock, "_HEARTBEAT_SECONDS", 100.0)
    suspended = lock_of(url)
    suspended.acquire()
    monkeypatch.setattr(bucket_lock, "_HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(bucket_lock, "_LEASE_SECONDS", 0.5)
    second = lock_of(url)
    second.acquire()
    with pytest.raises(ConfigurationError, match="lost its lock"):
        suspended.check()
    suspended.release()
    second.check()
    second.release()


def test_lock_of_a_killed_process_of_this_host_is_replaced_at_once(url: str) -> None:
    lock = bucket_lock.BucketLock(url)
    lock.acquire()
    content = lock._content().replace(b'"started"', b'"started before"')
    lock._identity = lock._path.replace(content, lock._identity)
    other = bucket_lock.BucketLock(url)
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
