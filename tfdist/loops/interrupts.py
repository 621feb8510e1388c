"""Ctrl-C in a run of several workers: all stop after the same step.

A worker that stopped at once would leave the others in an exchange that never ends, and rank 0
could not save the model. So the signal is only noted, and the workers agree on it after each call
of the inner loop, as they do on everything else.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_pending = False


def pending() -> bool:
    """Tells whether this worker was interrupted and has not stopped yet."""
    return _pending


@contextmanager
def held_back(stops_together: bool) -> Iterator[None]:
    """Within the block the first SIGINT is noted only; the second raises at once.

    Args:
        stops_together: Whether there are others to agree with; if not, nothing is held back.

    Raises:
        KeyboardInterrupt: At the end of the block, where no agreement came after the signal.
    """
    global _pending
    if not stops_together or not _python_handles_it():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        global _pending
        if _pending:
            signal.default_int_handler(number, frame)
        _pending = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
        if _pending:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _pending = False


def _python_handles_it() -> bool:
    """Whether a SIGINT would raise KeyboardInterrupt here; not so where a block is in another."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
