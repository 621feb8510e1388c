"""Writes files atomically, so that no incomplete file remains after a crash."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

#: Names of the temporary files of `replacing`.
_TEMPORARY = re.compile(r"\..+\.\d+(\.\w+)?")


def remove_interrupted(folder: Path) -> None:
    """Removes the temporary files of killed processes, if no other process writes to the folder."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _TEMPORARY.fullmatch(path.name) and path.is_file():
                path.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which replaces `path` if the block succeeds.

    The temporary file is in the same folder, because a rename is atomic only within one file
    system, and has the same suffix, by which Keras and matplotlib choose the format.

    Yields:
        The path to write to. If the block raises, that file is removed, and `path` is unchanged.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        # Flush the data before the rename, in case of a power failure between the two.
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
