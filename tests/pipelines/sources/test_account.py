"""Everything that lies in a source is counted: used, left out, or clutter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pipelines
from pipelines.index.__main__ import main as index
from pipelines.pack.__main__ import main as pack
from pipelines.show import main as show
from pipelines.sources import open_source
from pipelines.sources.account import Account
from pipelines.sources.source import Options
from tests.support import pictures

_NOT_UTF8 = os.fsdecode(b"caf\xe9.txt")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight images in two classes, one of which is a link, and seven other entries."""
    pictures.write_classes(tmp_path / "photos", 8)
    folder = tmp_path / "photos"
    (folder / "dog").rename(tmp_path / "elsewhere")
    (folder / "dog").symlink_to(tmp_path / "elsewhere")
    (folder / "dog" / "again").symlink_to(folder)
    (folder / "cat" / "gone.png").symlink_to("missing")
    (folder / "cat" / ".hidden.png").touch()
    for name in (".DS_Store", "Thumbs.db", "cat/._0.png", "cat/notes.txt", f"cat/{_NOT_UTF8}"):
        (folder / name).touch()
    return folder


def test_sum_equals_what_is_there(photos: Path, tmp_path: Path) -> None:
    assert pack([str(photos), str(tmp_path / "out"), "--from", "images"]) == 0
    fates = pipelines.load_account(tmp_path / "out").kinds["files"]
    left_out = {reason: (group.count, *group.examples) for reason, group in fates.left_out.items()}
    assert (fates.found, fates.used, fates.clutter) == (8 + 3 + 5, 8, 3)
    assert left_out == {
        "not read by --from images": (2, "cat/caf\\xe9.txt", "cat/notes.txt"),
        "hidden": (1, "cat/.hidden.png"),
        "broken link": (1, "cat/gone.png"),
        "link to a folder that contains it": (1, "dog/again"),
    }


def test_account_is_printed_stored_and_shown(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pack([str(photos), str(tmp_path / "out"), "--from", "images"]) == 0
    account = str(pipelines.load_account(tmp_path / "out"))
    assert "files: 16 found, 8 used, 5 left out, 3 clutter of the system\n" in account
    assert account in capsys.readouterr().out
    assert show([str(tmp_path / "out")]) == 0
    assert account in capsys.readouterr().out


def test_strict_refuses_what_is_left_out_or_guessed(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(photos), str(tmp_path / "out"), "--from", "images"]
    assert pack([*arguments, "--strict"]) == 1
    assert "files left out, not read by --from images: 2 (cat/caf" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert pack(arguments) == 0
    assert pack([*arguments, "--strict"]) == 1
    account = Account()
    account.change("rows", "read as int64", "a.csv")
    account.check_strict()
    account.change("rows", "decoded as cp1252", "a.csv", guessed=True)
    with pytest.raises(
        pipelines.DataError, match=r"--strict: rows decoded as cp1252: 1 \(a\.csv\)"
    ):
        account.check_strict()


def test_changes_of_every_shard_are_added_in_order() -> None:
    total = Account()
    for i in range(3):
        part = Account()
        part.change("files", "turned upright", f"{i}a", f"{i}b", guessed=i == 2)
        total.merge(part)
    group = total.kinds["files"].changed["turned upright"]
    assert (group.count, group.examples, group.guessed) == (6, ["0a", "0b", "1a"], True)


def test_index_accounts_for_the_files_of_its_folder(tmp_path: Path) -> None:
    pictures.write_classes(tmp_path / "photos", 4)
    pipelines.pack_dataset(str(tmp_path / "photos"), tmp_path / "out", num_workers=1)
    (tmp_path / "out" / "index.json").rename(tmp_path / "out" / "old.json")
    assert index([str(tmp_path / "out"), "--num-workers", "1"]) == 0
    fates = pipelines.load_account(tmp_path / "out").kinds["files"]
    assert (fates.found, fates.used, fates.left_out.popitem()[1].examples) == (2, 1, ["old.json"])


@pytest.mark.parametrize(("name", "found"), [("", 3), ("b.TXT", 1)])
def test_every_source_accounts_for_its_files(tmp_path: Path, name: str, found: int) -> None:
    for file in ("a.txt", "b.TXT", "c.pdf"):
        (tmp_path / file).write_text("one\n")
    fates = open_source(str(tmp_path / name), "auto", Options()).account.kinds["files"]
    assert (fates.found, fates.used) == (found, min(found, 2))
