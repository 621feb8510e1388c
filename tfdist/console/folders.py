"""Where tfdist writes, apart from the folders that flags name: caches, temporary files, sockets."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tfdist.errors import ConfigurationError

#: Maximum length of a socket's path in bytes (`sun_path` in unix(7)), less a name of ours.
_SOCKET_PATH = 107 - len("/tfdist-12345678/socket")


def cache() -> Path:
    """Returns the cache folder: `$XDG_CACHE_HOME/tfdist`, or `~/.cache/tfdist`.

    If there is no home folder, or it cannot be written, it is a folder of this user among the
    temporary ones. An existing cache folder is used even if it can only be read.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "tfdist"
    try:
        folder = Path.home() / ".cache" / "tfdist"
    except RuntimeError:  # no $HOME, and no entry in the password file
        return _of_this_user()
    existing = next(parent for parent in folder.parents if parent.exists())
    can_create = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return folder if folder.is_dir() or can_create else _of_this_user()


def staging_folder(url: str) -> Path:
    """Returns the local staging folder for the files of a run or of its checkpoints.

    Only the process that holds the lock of the URL writes to it. It is in the cache folder, which
    `XDG_CACHE_HOME` sets.
    """
    return cache() / "staging" / _as_path(url)


def not_uploaded_folder(url: str) -> Path:
    """Returns the local folder for files that could not be uploaded."""
    return cache() / "not-uploaded" / _as_path(url)


def download_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a new folder on the same disk as the staging folders; its `with` block removes it."""
    root = cache()
    root.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="download-", dir=root)


def provide_home() -> None:
    """Sets `HOME` to a folder among the temporary ones if this user has none.

    Without one, Keras creates a folder `~` in the working directory.

    Raises:
        ConfigurationError: No folder for temporary files can be written.
    """
    try:
        Path.home()
    except RuntimeError:
        home = _of_this_user()
        home.mkdir(mode=0o700, exist_ok=True)
        os.environ["HOME"] = str(home)


def temporary(prefix: str = "tfdist-") -> tempfile.TemporaryDirectory[str]:
    """Returns a new temporary folder; its `with` block removes it.

    Raises:
        ConfigurationError: No folder for temporary files can be written.
    """
    return tempfile.TemporaryDirectory(prefix=prefix, dir=temporary_root())


def temporary_root() -> str:
    """Returns the folder for temporary files, which `TMPDIR` sets.

    Raises:
        ConfigurationError: None can be written.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        if os.access("/dev/shm", os.W_OK | os.X_OK):  # a container with a read-only root
            return "/dev/shm"
        raise ConfigurationError(
            "No folder for temporary files can be written: /tmp, /var/tmp, /dev/shm, and the "
            "working directory. Set TMPDIR to a folder that this user can write."
        ) from None


def sockets() -> tempfile.TemporaryDirectory[str]:
    """Returns a new temporary folder whose path is short enough for sockets.

    Raises:
        ConfigurationError: There is none.
    """
    roots = dict.fromkeys([temporary_root(), "/tmp", "/dev/shm"])
    for root in roots:
        if len(os.fsencode(root)) <= _SOCKET_PATH and os.access(root, os.W_OK | os.X_OK):
            return tempfile.TemporaryDirectory(prefix="tfdist-", dir=root)
    raise ConfigurationError(
        f"The path of the temporary folder {next(iter(roots))} is too long for a socket, and /tmp "
        f"cannot be written. Set TMPDIR to a path of at most {_SOCKET_PATH} bytes."
    )


def rescue() -> Iterator[Path]:
    """Yields folders for a file that cannot be written where it belongs, the best first."""
    for find in (Path.cwd, Path.home, lambda: Path(temporary_root()), lambda: Path("/dev/shm")):
        with contextlib.suppress(OSError, RuntimeError):  # there is no such folder
            yield find()


def working() -> Path:
    """Returns the working directory.

    Raises:
        ConfigurationError: It was deleted.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ConfigurationError(
            "The working directory of this process was deleted. Change to a folder that exists, as "
            "with `cd`, and run the command again."
        ) from None


def _of_this_user() -> Path:
    folder = Path(temporary_root()) / f"tfdist-{os.geteuid()}"
    if folder.exists() and folder.stat().st_uid != os.geteuid():
        raise ConfigurationError(
            f"{folder} belongs to another user. Set XDG_CACHE_HOME to a folder for caches."
        )
    return folder


def _as_path(url: str) -> str:
    """Returns a relative path that no other URL has."""
    path = url.replace("://", "/")
    safe = re.sub(r"[^\w.=/-]", "_", path).replace("..", "_")
    return safe if safe == path else f"{safe}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
