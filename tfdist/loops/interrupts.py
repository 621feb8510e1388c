"""Stops a run on request: Ctrl-C, a scheduler that needs the machine back, or a time limit.

A worker that stopped at once would leave the others waiting in an all-reduce, and a state in the
middle of a step cannot be resumed from. So signal handlers only take a note, and the workers agree
on it after each call of the inner loop.

Kubernetes and Slurm send SIGTERM before they kill a process; Slurm's `--signal=USR1@120` sends
SIGUSR1 some time ahead.
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
_HINT = b"\nCtrl-C: stopping after this step. Press again to stop at once.\n"

_pending = 0
_holding = False
_raised = False  # a preemption was raised, and the run may be saving its state
_deadline = math.inf


class TimeIsUp(KeyboardInterrupt):
    """The time limit of a run has passed."""


def pending() -> int:
    """Returns the request to stop that this worker noted, for `stop`; 0 for none."""
    return _pending or (_TIME_IS_UP if time.monotonic() >= _deadline else 0)


def stop(request: int) -> KeyboardInterrupt:
    """Returns the exception for a request from `pending`, or for the largest of all workers."""
    kinds = {_TIME_IS_UP: TimeIsUp, _INTERRUPTED: KeyboardInterrupt, _PREEMPTED: Preempted}
    return kinds[request]()


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Limits the time of the block: loops stop at the end of a call when it has passed.

    Args:
        seconds: The limit, from now on; None for no limit.

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
    """Delays signals within the block: they are only noted, but a second SIGINT raises at once.

    Signal handlers that the user's code has set are kept.

    Args:
        agreed: Returns the maximum over all workers of a number.

    Raises:
        KeyboardInterrupt: At the end of the block, if a signal was noted that no loop has raised.
            `Preempted` if it was SIGTERM or SIGUSR1.
    """
    global _pending, _holding, _raised
    if _holding or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _replaced()
    _holding = True
    try:
        yield
        if request := agreed(_pending):
            raise stop(request)
    finally:
        _raised |= _pending == _PREEMPTED
        _pending, _holding = 0, False
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def preemption_raises() -> Iterator[None]:
    """Lets SIGTERM and SIGUSR1 raise `Preempted` once, within the block but outside `held_back`.

    Later signals are ignored, so that saving is not interrupted.
    """
    global _raised
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    free = [number for number in _PREEMPTING if signal.getsignal(number) is signal.SIG_DFL]
    _raised = False
    try:
        for number in free:
            signal.signal(number, _raise_once)
        yield
    finally:
        for number in free:
            signal.signal(number, signal.SIG_DFL)


def _replaced() -> dict[signal.Signals, Any]:
    """Sets handlers that take a note, except where the user has one; returns the old handlers."""
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
    os.write(2, _HINT)  # print is not safe in signal handlers


def _note_preemption(number: int, frame: FrameType | None) -> None:
    global _pending
    del number, frame
    _pending = _PREEMPTED


def _raise_once(number: int, frame: FrameType | None) -> None:
    global _raised
    del number, frame
    if not _raised:
        _raised = True
        raise Preempted
