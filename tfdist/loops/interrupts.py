"""Stops a run on Ctrl-C, on preemption by a scheduler, or after a time limit.

If a worker stopped immediately, the others would wait in an all-reduce, and the state within a step
cannot be saved. Therefore signal handlers only record the request, and the workers stop together
after a call of the inner loop.

Kubernetes and Slurm send SIGTERM before they kill a process; Slurm's `--signal=USR1@120` sends
SIGUSR1 some time before. A terminal that closes sends SIGHUP. Signals that are ignored when the
process starts stay ignored, as after `nohup`.
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

from tfdist.errors import REQUEUE, TERMINATED, Preempted

_TIME_IS_UP, _INTERRUPTED, _PREEMPTED = 1, 2, 3
_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_HINT = b"\nCtrl-C: stopping after this step. Press Ctrl-C again to stop immediately.\n"

_pending = 0
_holding = False
_raised = False  # a preemption was raised, and the run may be saving its state
_has_checkpoint = False
_deadline = math.inf


class TimeIsUp(KeyboardInterrupt):
    """The time limit of a run has passed."""


def pending() -> int:
    """Returns the recorded request to stop, for `stop`; 0 if there is none."""
    return _pending or (_TIME_IS_UP if time.monotonic() >= _deadline else 0)


def stop(request: int) -> KeyboardInterrupt:
    """Returns the exception for a request from `pending`, or for the largest of all workers."""
    if request == _PREEMPTED:
        return _preempted()
    return TimeIsUp() if request == _TIME_IS_UP else KeyboardInterrupt()


def note_checkpoint() -> None:
    """Records that there is a checkpoint to resume from, so that preemptions end with `REQUEUE`."""
    global _has_checkpoint
    _has_checkpoint = True


def _preempted() -> Preempted:
    return Preempted(REQUEUE if _has_checkpoint else TERMINATED)


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Limits the time of the block: loops stop at the end of a call when it has passed.

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
def deferred(agreed: Callable[[int], int] = int) -> Iterator[None]:
    """Records signals within the block instead of raising. A second SIGINT raises immediately.

    Signal handlers that the user's code has set are kept, but not those of `ray.init`. After a
    preemption, further ones are ignored, because the caller may be saving its state.

    Args:
        agreed: Returns the maximum of a number over all workers.

    Raises:
        KeyboardInterrupt: At the end of the block, if a signal was recorded and no loop raised it.
            `Preempted` if it was SIGTERM, SIGUSR1 or SIGHUP.
    """
    global _pending, _holding, _raised
    if _holding or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _replaced()
    _holding, is_preempted = True, False
    try:
        yield
        if request := agreed(_pending):
            raise stop(request)
    except Preempted:  # of this or another worker
        is_preempted = True
        raise
    finally:
        _raised |= is_preempted
        _pending, _holding = 0, False
        for number, handler in before.items():
            stays = is_preempted and handler is signal.SIG_DFL
            signal.signal(number, _ignore if stays else handler)


@contextmanager
def preemption_raises() -> Iterator[None]:
    """Makes preempting signals raise `Preempted` once, within the block but outside `deferred`.

    Later ones are ignored until the process has ended, so that saving is not interrupted, and the
    exit code stays.
    """
    global _raised
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    free = [n for n in _PREEMPTING if signal.getsignal(n) in (signal.SIG_DFL, _ignore)]
    _raised = False
    try:
        for number in free:
            signal.signal(number, _raise_once)
        yield
    finally:
        for number in free:
            signal.signal(number, _ignore if _raised else signal.SIG_DFL)


def _replaced() -> dict[signal.Signals, Any]:
    """Sets recording handlers, unless the user has set others. Returns the previous handlers."""
    usual = {signal.SIGINT: signal.default_int_handler} | dict.fromkeys(_PREEMPTING, signal.SIG_DFL)
    before = {}
    for number, default in usual.items():
        handler = signal.getsignal(number)
        # Ray's own handler only exits, before the training could save.
        if (
            handler in (default, _raise_once, _ignore)
            or str(getattr(handler, "__module__", "")).partition(".")[0] == "ray"
        ):
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
        raise _preempted()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handles preempting signals after the first one, until the next training."""
