"""Standard streams whose reader, terminal or disk is lost: the run continues without them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_LOST = {
    *(errno.EIO, errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ESTALE, errno.ENXIO),
}
_NAMES = {1: "Standard output", 2: "Standard error"}
_DESCRIPTORS = {"stdout": 1, "stderr": 2}


class _LossyFile(io.FileIO):
    """A standard stream that drops what cannot be written, and says so once on the other stream."""

    _warned = False

    def write(self, data: Any) -> int:
        while True:
            try:
                written = super().write(data)
            except OSError as error:
                if error.errno not in _LOST:
                    raise
                if not self._warned:
                    self._warned = True
                    say(3 - self.fileno(), lost(_NAMES[self.fileno()], error))
                return len(memoryview(data).cast("B"))
            if written is not None:
                return written
            # Another process that shares the terminal made it non-blocking, and it is full.
            select.select([], [self.fileno()], [])


def lost(name: str, error: Exception) -> str:
    """Returns the warning about a stream that cannot be written."""
    reason = getattr(error, "strerror", None) or str(error)
    return f"warning: {name} cannot be written ({reason}). The run continues without it.\n"


def say(descriptor: int, line: str) -> None:
    """Writes a line to a file descriptor if that works."""
    with contextlib.suppress(OSError):
        os.write(descriptor, line.encode())


def guard() -> None:
    """Makes this process survive the loss of its standard streams.

    Descriptors that are closed, as in some daemons, become the null device, so that no file is
    opened under the number of a stream. Replaces `sys.stdout` and `sys.stderr` unless a test or a
    notebook has done so.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    for name, descriptor in _DESCRIPTORS.items():
        if getattr(sys, name) is getattr(sys, f"__{name}__"):
            setattr(sys, name, _guarded(getattr(sys, name), descriptor))


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Does what `guard` does within the block, for progress bars in a user's script."""
    before = {name: getattr(sys, name) for name in _DESCRIPTORS}
    guard()
    within = {name: getattr(sys, name) for name in _DESCRIPTORS}
    try:
        yield
    finally:
        for name, stream in within.items():
            if stream is not before[name]:
                stream.flush()
                if getattr(sys, name) is stream:
                    setattr(sys, name, before[name])


def _guarded(stream: TextIO | None, descriptor: int) -> TextIO:
    raw = _LossyFile(descriptor, "w", closefd=False)
    if stream is None:  # it was closed when Python started
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace")
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
        write_through=getattr(stream, "write_through", False),
    )
