"""What ends a run from outside, Ctrl-C or a time that is up: all workers stop after the same step.

A worker that stopped at once would leave the others in an exchange that never ends, and rank 0
could not save the model. So the signal is only noted, and the workers agree on it after each call
of the inner loop, as they do on everything else.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_pending = False
_deadline = math.inf


class TimeIsUp(KeyboardInterrupt):
    """The time that a run was given has passed."""


def pending() -> bool:
    """Tells whether this worker was interrupted and has not stopped yet."""
    return _pending


def time_is_up() -> bool:
    """Tells whether this worker's deadline has passed."""
    return time.monotonic() >= _deadline


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Within the block loops stop at the end of a call when so many seconds have passed.

    Args:
        seconds: From now on, without end if None.

    Raises:
        TimeIsUp: On all workers, after the same step.
    """
    global _deadline
    _deadline = math.inf if seconds is None else time.monotonic() + seconds
    try:
        yield
    finally:
        _deadline = math.inf


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
