"""Folders of checkpoints, and the lock of a run folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.checkpoint.training import repeatable
from tests.support.starting import piped, wait_for_line
from tests.support.training import X, Y
from tfdist.checkpoint import lock, manifest
from tfdist.checkpoint.__main__ import main
from tfdist.checkpoint.lock import FolderLock
from tfdist.checkpoint.manifest import DamagedError, UnreadableError
from tfdist.checkpoint.snapshot import Snapshot
from tfdist.checkpoint.store import Place, Store
from tfdist.errors import ConfigurationError

FACTS = {"step": 1, "written": "now", "logs": {"loss": 0.5}}
PLACES = [Place(1, 0), Place(2, 0), Place(4, 1)]


def written(folder: Path) -> Store:
    """Writes three checkpoints."""
    store = Store(folder)
    for place in PLACES:
        saved = Snapshot({"model/0": np.arange(9.0) + place.step}, {"model/0": "a/kernel"})
        saved.state = {"list": [1, 2.5, None, np.ones(2)], "text": "x"}
        store.write(place, saved.packed(), FACTS)
    return store


def test_write_and_load_round_trip(tmp_path: Path) -> None:
    store, lines = written(tmp_path), list[str]()
    result = store.load_newest(lines.append)
    assert result is not None
    assert result[0] == store.path(PLACES[-1])
    assert not lines
    saved = Snapshot.unpacked(result[1])
    np.testing.assert_equal(saved.variables, {"model/0": np.arange(9.0) + 4})
    np.testing.assert_equal(saved.state, {"list": [1, 2.5, None, np.ones(2)], "text": "x"})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def newest(store: Store, lines: list[str] | None = None) -> str | None:
    result = store.load_newest((lines if lines is not None else []).append)
    return result and result[0]


FILES = ["manifest.json", "state.json", "variables.index", "variables.data-00000-of-00001"]


@pytest.mark.parametrize("damage", [truncate, empty, flip, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_skips_a_damaged_checkpoint(
    damage: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    store, lines = written(tmp_path), list[str]()
    damage(Path(store.path(PLACES[-1])) / name)
    assert newest(store, lines) == store.path(PLACES[-2])
    (line,) = lines
    assert name in line
    assert line.endswith("Resuming from an older checkpoint.")
    assert main(["verify", str(tmp_path)]) == 1


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest, and updates its checksum."""
    content = json.loads((path / manifest.NAME).read_text())
    change(content)
    content["crc32c"] = manifest._checksum_of(content)
    (path / manifest.NAME).write_text(json.dumps(content))


def test_manifest_without_files_is_damage(tmp_path: Path) -> None:
    store = written(tmp_path)
    rewrite_manifest(Path(store.path(PLACES[-1])), lambda content: content.pop("files"))
    assert newest(store) == store.path(PLACES[-2])
    with pytest.raises(DamagedError, match="does not list the files"):
        manifest.read(store.path(PLACES[-1]))
    assert main(["list", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_deeply_nested_json_is_damage(name: str, tmp_path: Path) -> None:
    store = written(tmp_path)
    path = Path(store.path(PLACES[-1]))
    (path / name).write_text("[" * 100_000)
    if name != manifest.NAME:
        measured = manifest.measure(str(path / name))
        rewrite_manifest(path, lambda content: content["files"].update({name: measured}))
    assert newest(store) == store.path(PLACES[-2])


def test_all_checkpoints_damaged_raises(tmp_path: Path) -> None:
    store = written(tmp_path)
    for place in PLACES:
        flip(Path(store.path(place)) / "state.json")
    with pytest.raises(ConfigurationError, match=r"All 3 .* are damaged.*--resume never") as raised:
        newest(store)
    assert all(store.path(place) in str(raised.value) for place in PLACES)
    assert store.all_damaged()


def test_newer_format_raises_unreadable_error(tmp_path: Path) -> None:
    store = written(tmp_path)
    rewrite_manifest(
        Path(store.path(PLACES[-1])),
        lambda content: content.update({"format": manifest.FORMAT + 1}),
    )
    with pytest.raises(UnreadableError, match="use the version of tfdist that wrote it"):
        newest(store)


@pytest.mark.parametrize("name", FILES)
def test_io_error_raises_unreadable_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = written(tmp_path)
    opened = tf.io.gfile.GFile

    def refuse(path: str, mode: str = "r") -> Any:
        if path == f"{store.path(PLACES[-1])}/{name}":
            raise tf.errors.PermissionDeniedError(None, None, f"{path}; Permission denied")
        return opened(path, mode)

    monkeypatch.setattr(tf.io.gfile, "GFile", refuse)
    with pytest.raises(UnreadableError, match=rf"{name} cannot be read .*Permission denied"):
        newest(store)


def test_unlistable_folder_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> Any:
        raise tf.errors.PermissionDeniedError(None, None, f"{path}; Permission denied")

    store = written(tmp_path)
    monkeypatch.setattr(tf.io.gfile, "listdir", refuse)
    with pytest.raises(UnreadableError, match="Permission denied"):
        store.places()


def test_removes_temporary_folders_of_interrupted_saves(tmp_path: Path) -> None:
    store = written(tmp_path)
    (tmp_path / ".writing-epoch-0001-step-000000009-17-ab").mkdir()
    store.clean()
    assert {path.name for path in tmp_path.iterdir()} == {place.name for place in PLACES}


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    store = written(tmp_path)
    store.keep(1, PLACES[0])
    assert store.places() == [PLACES[2], PLACES[0]]


def test_rewrites_only_damaged_checkpoints(tmp_path: Path) -> None:
    store = written(tmp_path)
    first = Path(store.path(PLACES[0])) / manifest.NAME
    before = first.stat().st_mtime_ns
    flip(Path(store.path(PLACES[2])) / "state.json")
    written(tmp_path)
    assert first.stat().st_mtime_ns == before
    assert newest(store) == store.path(PLACES[2])


def test_failed_write_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="file"):
        written(tmp_path / "file" / "folder")


def test_folder_without_manifest_raises(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"is not a checkpoint: it has no manifest\.json"):
        manifest.read(str(tmp_path))


_HOLDER = """
import sys, time
from tfdist.checkpoint.lock import FolderLock
held = FolderLock(sys.argv[1])
held.acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_lock_refuses_a_second_run_and_survives_a_kill(tmp_path: Path) -> None:
    with piped(sys.executable, "-c", _HOLDER, str(tmp_path)) as process:
        wait_for_line(process, "held")
        with pytest.raises(ConfigurationError, match=rf"in use .*process {process.pid} on host"):
            repeatable(tmp_path).fit(X, Y, epochs=1, verbose=0)
    assert (tmp_path / lock.NAME).exists()
    repeatable(tmp_path).fit(X, Y, epochs=1, verbose=0)
    assert not (tmp_path / lock.NAME).exists()


def test_expired_lock_of_another_host_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_LEASE_SECONDS", 0.5)
    monkeypatch.setattr(lock, "_HEARTBEAT_SECONDS", 0.1)
    other = FolderLock(tmp_path)
    other.acquire()
    other.release()
    (tmp_path / lock.NAME).write_text(
        "filelock/2\npid=1\nhost=another\nmode=lease\ntoken=ab\nduration=0.5\n"
    )
    mine = FolderLock(tmp_path)
    mine.acquire()
    assert "another" not in (tmp_path / lock.NAME).read_text()
    mine.check()
    mine.release()


def test_lost_lock_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_HEARTBEAT_SECONDS", 0.05)
    mine = FolderLock(tmp_path)
    mine.acquire()
    (tmp_path / lock.NAME).unlink()
    assert mine._lease is not None
    deadline = time.monotonic() + 60
    while mine._lease.compromise is None and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ConfigurationError, match="lost its lock"):
        mine.check()
    mine.release()


def test_fit_releases_the_lock_on_success_and_failure(tmp_path: Path) -> None:
    for epochs in (1, 2):
        repeatable(tmp_path).fit(X, Y, epochs=epochs, verbose=0)
    with pytest.raises(ConfigurationError, match="already has checkpoints"):
        repeatable(tmp_path, resume="never").fit(X, Y, epochs=1, verbose=0)
    assert not (tmp_path / lock.NAME).exists()
