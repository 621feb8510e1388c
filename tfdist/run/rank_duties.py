"""What the workers of a command do one after the other, and who of them talks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdist.strategies import Strategy


@contextmanager
def in_turns(strategy: Strategy) -> Iterator[None]:
    """Lets the workers of a host in one after the other: the first writes what the next find."""
    mine = strategy.local_rank
    turns = int(strategy.gather([mine]).max()) + 1
    for _ in range(mine):
        strategy.barrier()
    yield
    for _ in range(turns - mine):
        strategy.barrier()


@contextmanager
def printing_to(path: Path | None) -> Iterator[None]:
    """Sends what this process prints, libraries included, to a file; None: leaves it alone."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    streams = (sys.stdout, sys.stderr)
    before = [os.dup(stream.fileno()) for stream in streams]
    with path.open("a") as file:
        for stream in streams:
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    try:
        yield
    finally:
        for stream, descriptor in zip(streams, before, strict=True):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)
