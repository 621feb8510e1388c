"""Local folders for files on their way to or from an object store."""

from __future__ import annotations

import hashlib
import re
import tempfile
from pathlib import Path

from tfdist.console import folders


def staging_folder(url: str) -> Path:
    """Returns the local staging folder for the files of a run or of its checkpoints.

    Only the process that holds the lock of the URL writes to it. It is in the cache folder, which
    `XDG_CACHE_HOME` sets.
    """
    return folders.cache() / "staging" / _as_path(url)


def not_uploaded_folder(url: str) -> Path:
    """Returns the local folder for files that could not be uploaded."""
    return folders.cache() / "not-uploaded" / _as_path(url)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a new folder on the same disk as the staging folders; its `with` block removes it."""
    root = folders.cache()
    root.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="download-", dir=root)


def _as_path(url: str) -> str:
    """Returns a relative path that no other URL has."""
    path = url.replace("://", "/")
    safe = re.sub(r"[^\w.=/-]", "_", path).replace("..", "_")
    return safe if safe == path else f"{safe}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
