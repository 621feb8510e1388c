"""Making a folder of shards appear whole or not at all.

Shards are written into a hidden folder beside the destination, forced to disk, and renamed. The
rename is the only step that shows, and only one of several racing processes succeeds in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipelines.errors import DataError
from pipelines.format.index import INDEX_NAME, Index, check_shards, load_index


def found_in(directory: Path, wanted: Mapping[str, object]) -> Index | None:
    """The index of the folder if there is one already, checked to hold what is wanted.

    Args:
        directory: where the folder is or will be.
        wanted: attributes of the index, by name, that tell whether it holds the same.

    Returns:
        The index, or None where there is nothing yet.

    Raises:
        DataError: the folder holds something else.
    """
    if not _holds_something(directory):
        return None
    if not (directory / INDEX_NAME).exists():
        raise DataError(
            f"{directory}: expected a new or empty folder, or one with an index, found other files "
            "in it; name another folder"
        )
    index = load_index(directory)
    for name, expected in wanted.items():
        if (came := getattr(index, name)) != expected:
            raise DataError(
                f"{directory}: holds other data: {name}: expected {expected}, found {came}; "
                "name another folder"
            )
    check_shards(directory, index.shards)
    return index


def publish(folder: Path, directory: Path, index: Index, wanted: Mapping[str, object]) -> Index:
    """Writes the index into a folder of shards and renames the folder to its final name.

    Args:
        folder: holds the shards, on the same file system as `directory`.
        directory: the name to give it.
        index: of the shards.
        wanted: what another process's folder must hold to be as good, see `found_in`.

    Returns:
        The index that is there now: another process may have been first.

    Raises:
        DataError: another process made a folder of other data.
    """
    write_index(folder, index)
    # Contents reach the disk before the name does, or a power cut could show an empty file under
    # a good name.
    for path in [*folder.iterdir(), folder]:
        _sync(path)
    try:
        folder.rename(directory)  # succeeds over nothing or an empty folder only
    except OSError:
        if found := found_in(directory, wanted):
            return found
        raise
    _sync(directory.parent)
    return index


def write_index(folder: Path, index: Index) -> None:
    """Writes the index of a folder, or a new one over it: whole or not at all."""
    write_whole(folder / INDEX_NAME, index.model_dump_json(indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes a small file so that its name never stands for a half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, "utf-8")
    _sync(partial)
    partial.rename(path)


def _holds_something(directory: Path) -> bool:
    return directory.exists() and any(directory.iterdir())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
