"""Parts that several machines pack are the folder that one machine packs, byte for byte."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from pipelines import storage
from pipelines.pack.__main__ import main as pack
from pipelines.pack.packing import packed

SOURCE = [f"line {i}\n" for i in range(100)]
OPTIONS = ["--num-shards", "7", "--seed", "3", "--num-workers", "1"]
_numbers_of_folders = itertools.count()


@pytest.fixture(params=["local", "memory"])
def dest(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "packed")
    pytest.importorskip("obstore", reason="needs the extra 'cloud'")
    return f"memory://bucket/packed-{next(_numbers_of_folders)}"


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(SOURCE))
    return str(path)


def contents(folder: str) -> dict[str, bytes]:
    """The files of a folder without the offsets, which are written when a folder is read."""
    path = storage.at(folder)
    local = isinstance(path, Path)
    names = [file.name for file in path.iterdir()] if local else path.sizes()
    return {name: (path / name).read_bytes() for name in names if name != "offsets.npz"}


def on_one_machine(source: str, tmp_path: Path) -> dict[str, bytes]:
    packed(source, tmp_path / "one", num_shards=7, seed=3, num_workers=1)
    return contents(str(tmp_path / "one"))


def test_parts_equal_the_folder_of_one_machine(source: str, dest: str, tmp_path: Path) -> None:
    """In any order, and with a part that runs twice; the last one publishes the folder."""
    for part in ("2/3", "1/3", "2/3", "3/3"):
        assert pack([source, dest, *OPTIONS, "--part", part]) == 0
    assert contents(dest) == on_one_machine(source, tmp_path)
    assert pack([source, dest, *OPTIONS, "--part", "1/3"]) == 0  # all parts are finished


def test_finish_names_missing_parts(
    source: str, dest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack([source, dest, *OPTIONS, "--part", "1/2"]) == 0
    assert "part 1/2 is complete" in capsys.readouterr().out
    assert not (storage.at(dest) / "index.json").is_file()
    assert pack([source, dest, *OPTIONS, "--finish"]) == 1
    message = "3 of 7 shards are missing, the first is data-00001-of-00007.tfrecord"
    assert message in capsys.readouterr().err
    assert pack([source, dest, *OPTIONS, "--part", "2/2"]) == 0
    assert pack([source, dest, *OPTIONS, "--finish"]) == 0
    assert contents(dest) == on_one_machine(source, tmp_path)


def test_parts_of_other_plans_raise(
    source: str, dest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack([source, dest, *OPTIONS, "--part", "1/2"]) == 0
    assert pack([source, dest, *OPTIONS, "--seed", "4", "--part", "2/2"]) == 1
    assert "parts that were packed with other options" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["3", "0/2", "3/2", "a/b", "/2"])
def test_invalid_parts_are_rejected(
    source: str, tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack([source, str(tmp_path / "packed"), "--part", part]) == 1
    assert "expected a part such as 3/16" in capsys.readouterr().err


def test_packing_to_a_url_at_once(source: str, tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="needs the extra 'cloud'")
    url = f"memory://bucket/packed-{next(_numbers_of_folders)}"
    index = packed(source, url, num_shards=7, seed=3, num_workers=1)
    assert contents(url) == on_one_machine(source, tmp_path)
    assert "offsets.npz" in storage.RemotePath(url).sizes()
    assert packed(source, url, num_shards=7, seed=3, num_workers=1) == index
