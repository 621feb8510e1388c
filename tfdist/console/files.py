"""Writing a file so that a reader, or a kill, never meets half of one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to, which takes the place of `path` when the block succeeds.

    The temporary file lies in the same folder, because a rename is atomic only within one file
    system, and ends as `path` does, because Keras and matplotlib choose the format by the suffix.

    Args:
        path: the file to write or replace.

    Yields:
        The path to write to. When the block raises, it is removed and `path` stays as it was.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as file:  # on the disk before the name is: a power cut is a kill
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
