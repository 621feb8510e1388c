"""Lines and files of text, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import DataError
from pipelines.sources import open_source
from pipelines.sources.source import Options
from tests.support import opened


def test_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("eins\r\n\n  zwei größer\n \nno end".encode())
    source = opened.source(tmp_path / "a.txt")
    texts = [e["text"].decode() for e in opened.examples(source, [2, 0, 1])]
    assert texts == ["no end", "eins", "  zwei größer"]


def test_classes_and_whole_files(tmp_path: Path) -> None:
    for name in ("pos/a.txt", "neg/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f"of {name}\nsecond\n")
    by_line = opened.examples(opened.source(tmp_path))
    assert [(e["text"], e["label"]) for e in by_line] == [
        (b"of neg/b.txt", 0),
        (b"second", 0),
        (b"of pos/a.txt", 1),
        (b"second", 1),
    ]
    whole = opened.examples(opened.source(tmp_path, whole_files=True))
    assert [(e["text"], e["file"]) for e in whole] == [
        (b"of neg/b.txt\nsecond\n", b"neg/b.txt"),
        (b"of pos/a.txt\nsecond\n", b"pos/a.txt"),
    ]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text("ab é\t", min_size=1).filter(str.strip), min_size=1, max_size=9))
def test_every_line_is_restored(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    assert [e["text"].decode() for e in opened.examples(opened.source(path))] == lines


def test_files_beside_folders_are_read_without_classes(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("x.txt", "more/y.txt"):
        (tmp_path / name).write_text("one\n")
    source = open_source(str(tmp_path), "auto", Options())
    assert [feature.name for feature in source.features] == ["text", "file"]
    with pytest.raises(DataError, match="files read without classes"):
        source.account.check_strict()


def test_doubtful_lines_and_classes_are_guesses(tmp_path: Path) -> None:
    (tmp_path / "texts" / "all" / "good").mkdir(parents=True)
    (tmp_path / "texts" / "all" / "good" / "a.txt").write_bytes(b"one\rtwo\r\nthree\r\n")
    account = str(open_source(str(tmp_path / "texts"), "auto", Options()).account)
    assert "lines with a carriage return inside, which does not end a line, a guess: 1" in account
    assert "read as one class, whose subfolders are no classes, a guess: 1 (all/good)" in account
