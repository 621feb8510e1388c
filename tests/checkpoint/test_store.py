"""A checkpoint is whole or absent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tfdist.checkpoint import manifest
from tfdist.checkpoint.__main__ import main
from tfdist.checkpoint.manifest import DamagedError
from tfdist.checkpoint.snapshot import Packed, Snapshot
from tfdist.checkpoint.store import Place, Store

FACTS = {"step": 1, "written": "now", "logs": {"loss": 0.5}}
PLACES = [Place(1, 0), Place(2, 0), Place(4, 1)]


def written(folder: Path) -> Store:
    """Three checkpoints."""
    store = Store(folder)
    for place in PLACES:
        saved = Snapshot({"model/0": np.arange(9.0) + place.step}, {"model/0": "a/kernel"})
        saved.state = {"list": [1, 2.5, None, np.ones(2)], "text": "x"}
        store.write(place, saved.packed(), FACTS)
    return store


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store, told = written(tmp_path), list[str]()
    path = store.newest_sound(told.append)
    assert path == store.path(PLACES[-1])
    assert not told
    saved = Snapshot.unpacked(Packed.read(str(path)))
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


@pytest.mark.parametrize("damage", [truncate, empty, flip, Path.unlink])
@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "variables.index", "variables.data-00000-of-00001"]
)
def test_damaged_is_passed_over(damage: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    store, told = written(tmp_path), list[str]()
    damage(Path(store.path(PLACES[-1])) / name)
    assert store.newest_sound(told.append) == store.path(PLACES[-2])
    (line,) = told
    assert name in line
    assert line.endswith("The checkpoint before it is taken.")
    assert main(["verify", str(tmp_path)]) == 1


def test_what_a_save_left_behind_is_removed(tmp_path: Path) -> None:
    store = written(tmp_path)
    (tmp_path / ".writing-epoch-0001-step-000000009-17-ab").mkdir()
    store.clean()
    assert {path.name for path in tmp_path.iterdir()} == {place.name for place in PLACES}


def test_newest_and_best_stay(tmp_path: Path) -> None:
    store = written(tmp_path)
    store.keep(1, PLACES[0])
    assert store.places() == [PLACES[2], PLACES[0]]


def test_a_damaged_one_is_written_anew_and_a_whole_one_stays(tmp_path: Path) -> None:
    store = written(tmp_path)
    first = Path(store.path(PLACES[0])) / manifest.NAME
    before = first.stat().st_mtime_ns
    flip(Path(store.path(PLACES[2])) / "state.json")
    written(tmp_path)
    assert first.stat().st_mtime_ns == before
    assert store.newest_sound(print) == store.path(PLACES[2])


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="file"):
        written(tmp_path / "file" / "folder")


def test_foreign_folders_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"is no checkpoint: it has no manifest\.json"):
        manifest.verify(str(tmp_path))
