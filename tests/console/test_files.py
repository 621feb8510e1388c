"""Files are replaced atomically."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdist.console.files import replacing


def test_replaces_the_text_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("old", "new"):
        with replacing(path) as temporary:
            assert temporary.suffix == path.suffix
            temporary.write_text(text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
