"""Work that the workers of a host do one after the other, and redirection of their output."""

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
    """Runs the block on one worker of a host at a time: the first writes, the others find."""
    mine = strategy.local_rank
    turns = int(strategy.gather([mine]).max()) + 1
    for _ in range(mine):
        strategy.barrier()
    yield
    for _ in range(turns - mine):
        strategy.barrier()


@contextmanager
def printing_to(path: Path | None) -> Iterator[None]:
    """Redirects the output of this process and its libraries to a file; None changes nothing."""
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
