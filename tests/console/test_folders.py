"""Where files go that no flag names, and how a file is replaced atomically."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.starting import ENVIRON, run
from tfdist.console import folders
from tfdist.console.files import replacing
from tfdist.errors import ConfigurationError


@pytest.fixture(autouse=True)
def usual_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_cache_is_among_temporary_files_without_a_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = tmp_path / f"tfdist-{os.geteuid()}"
    monkeypatch.setenv("HOME", "/dev/null")
    assert folders.cache() == expected
    with monkeypatch.context() as read_only:
        read_only.setenv("HOME", "/")
        read_only.setattr(os, "access", lambda *_: False)
        assert folders.cache() == expected
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 123456)  # has no entry in the password file
    assert folders.cache() == expected
    with monkeypatch.context() as without_home:
        without_home.setattr(os, "environ", {**os.environ})
        folders.provide_home()
        assert os.environ["HOME"] == str(expected)
    expected.rmdir()
    monkeypatch.setattr(os, "geteuid", lambda: 123456)
    (tmp_path / "tfdist-123456").mkdir()
    with pytest.raises(ConfigurationError, match=r"belongs to another user. Set XDG_CACHE_HOME"):
        folders.cache()


def test_existing_or_named_cache_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folders.cache() == tmp_path / ".cache" / "tfdist"
    monkeypatch.setattr(os, "access", lambda *_: False)
    (tmp_path / ".cache" / "tfdist").mkdir(parents=True)  # by another image; may be read
    assert folders.cache() == tmp_path / ".cache" / "tfdist"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert folders.cache() == Path("/proc/tfdist")


def test_sockets_get_a_short_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with folders.sockets() as name:
        assert len(name) < 40
    monkeypatch.setattr(os, "access", lambda path, _: path == str(long))
    with pytest.raises(ConfigurationError, match=r"too long for a socket.* Set TMPDIR"):
        folders.sockets()


def test_no_temporary_folder_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", missing)
    assert folders.temporary_root() == "/dev/shm"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigurationError, match="Set TMPDIR to a folder"):
        folders.temporary()


@pytest.mark.parametrize("module", ["tfdist.launch", "tfdist.train"])
def test_deleted_working_directory_is_one_line(module: str, tmp_path: Path) -> None:
    command = 'mkdir gone; cd gone; rmdir ../gone; "$0" -m "$1" --help'
    done = run("sh", "-c", command, sys.executable, module, cwd=tmp_path, env=ENVIRON, code=1)
    assert done.stderr.startswith("error: The working directory of this process was deleted.")
    assert len(done.stderr.splitlines()) == 1


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
