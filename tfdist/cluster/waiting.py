"""Shows the launcher which workers wait for the others, by a file for each in a folder of the run.

A worker that ends before all workers have connected would otherwise be noticed only when the time
limit of the rendezvous has passed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

#: The variable with the path of the folder. Only workers of a launcher have it.
FOLDER = "TFDIST_WAITING"


@contextlib.contextmanager
def shown(rank: int) -> Iterator[None]:
    """Shows that a worker waits for the others within the block."""
    if not (folder := os.environ.get(FOLDER)):
        yield
        return
    file = Path(folder) / str(rank)
    with contextlib.suppress(OSError):  # the launcher has ended, or the disk is full
        file.touch()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def ranks(folder: str) -> set[str]:
    """Returns the ranks of the waiting workers; empty without a folder."""
    return {file.name for file in Path(folder).iterdir()} if folder else set()
