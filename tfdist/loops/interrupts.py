"""What ends a run from outside: Ctrl-C, a scheduler that wants its machine back, a time that is up.

A worker that stopped at once would leave the others in an exchange that never ends, and a state in
the middle of a step is none to go on from. So signals are only noted, and the workers agree on them
after each call of the inner loop, as they do on everything else; one worker agrees with itself.

SIGTERM is what Kubernetes and Slurm send before they end a process, SIGUSR1 what Slurm's
`--signal=USR1@120` sends ahead of that.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tfdist.errors import Preempted

_TIME_IS_UP, _INTERRUPTED, _PREEMPTED = 1, 2, 3
_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)
_HINT = b"\nCtrl-C: stops after this step; once more: at once.\n"

_pending = 0
_holding = False
_obeyed = False  # a preemption has been raised: what follows saves
_deadline = math.inf


class TimeIsUp(KeyboardInterrupt):
    """The time that a run was given has passed."""


def pending() -> int:
    """Returns what this worker was told and has not obeyed yet, for `stop`; 0: nothing."""
    return _pending or (_TIME_IS_UP if time.monotonic() >= _deadline else 0)


def stop(told: int) -> KeyboardInterrupt:
    """Returns what to raise where `pending` was this, or the largest of several workers'."""
    kinds = {_TIME_IS_UP: TimeIsUp, _INTERRUPTED: KeyboardInterrupt, _PREEMPTED: Preempted}
    return kinds[told]()


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
def held_back(agreed: Callable[[int], int] = int) -> Iterator[None]:
    """Within the block signals are noted only; the second SIGINT raises at once.

    A handler that somebody else has set stays.

    Args:
        agreed: Returns the largest of what all workers say, to each of them.

    Raises:
        KeyboardInterrupt: At the end of the block, where a signal came that nobody raised yet; a
            `Preempted` where it was SIGTERM or SIGUSR1.
    """
    global _pending, _holding, _obeyed
    if _holding or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _replaced()
    _holding = True
    try:
        yield
        if told := agreed(_pending):
            raise stop(told)
    finally:
        _obeyed |= _pending == _PREEMPTED
        _pending, _holding = 0, False
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def preemption_raises() -> Iterator[None]:
    """Within the block, outside of `held_back`, SIGTERM and SIGUSR1 raise `Preempted`, once.

    What comes later is not heard, so that what is saved then is saved whole.
    """
    global _obeyed
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    free = [number for number in _PREEMPTING if signal.getsignal(number) is signal.SIG_DFL]
    _obeyed = False
    try:
        for number in free:
            signal.signal(number, _raise_once)
        yield
    finally:
        for number in free:
            signal.signal(number, signal.SIG_DFL)


def _replaced() -> dict[signal.Signals, Any]:
    """Sets the handlers that note; returns what was there, of signals nobody else handles."""
    usual = {signal.SIGINT: signal.default_int_handler} | dict.fromkeys(_PREEMPTING, signal.SIG_DFL)
    before = {}
    for number, default in usual.items():
        handler = signal.getsignal(number)
        if handler is default or handler is _raise_once:
            before[number] = handler
            signal.signal(number, _note_interrupt if number == signal.SIGINT else _note_preemption)
    return before


def _note_interrupt(number: int, frame: FrameType | None) -> None:
    global _pending
    if _pending:
        signal.default_int_handler(number, frame)
    _pending = _INTERRUPTED
    os.write(2, _HINT)  # print is not for handlers


def _note_preemption(number: int, frame: FrameType | None) -> None:
    global _pending
    del number, frame
    _pending = _PREEMPTED


def _raise_once(number: int, frame: FrameType | None) -> None:
    global _obeyed
    del number, frame
    if not _obeyed:
        _obeyed = True
        raise Preempted
