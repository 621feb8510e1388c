"""How far this worker is: written by the trainer, read by the thread that reports."""

from __future__ import annotations

import os
import socket

from tfdist.watchdog.clock import Clock
from tfdist.watchdog.report import Report, State

#: How often a worker reports.
HEARTBEAT_SECONDS = 1.0


class Status:
    """How far this worker is.

    Args:
        rank: Its number.
        on_gpus: Whether it computes on GPUs.

    Attributes:
        seconds: For which nobody may have passed a place.
        clock: Of all times that workers tell of themselves and of each other.
    """

    def __init__(self, rank: int, on_gpus: bool = False) -> None:
        self.rank, self.seconds = rank, 0.0
        self.clock = Clock(HEARTBEAT_SECONDS)
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._num_calls = self._num_passed = 0
        self._on_gpus, self._task = on_gpus, ""
        self._compiled: set[str] = set()
        self._place, self._state, self._error = "nothing", State.OUTSIDE, ""
        self._moved = self.clock.now()

    @property
    def at_work(self) -> bool:
        """Whether it is in a call of the trainer."""
        return self._state is State.AT_WORK

    def enter(self, task: str, seconds: float) -> None:
        """Begins a call of the trainer."""
        self.seconds = seconds
        self._num_calls, self._num_passed = self._num_calls + 1, 0
        self._state, self._error = State.AT_WORK, ""
        self._task = task
        self.passed(f"the start of {task}")

    def passed(self, place: str) -> None:
        """Passes a place; the trainers of all workers pass the same ones in the same order."""
        self._place, self._moved = place, self.clock.now()
        self._num_passed += 1
        if self._num_passed > 1:  # more than the start of the call: the first steps are done
            self._compiled.add(self._task)

    def leave(self, state: State, error: str = "") -> None:
        """Ends a call of the trainer."""
        self._state, self._error, self._moved = state, error, self.clock.now()

    def end(self) -> None:
        """Ends the process in order, unless something else is known of its end."""
        if self._state is State.OUTSIDE:
            self.leave(State.ENDED)

    def report(self) -> Report:
        """Returns what to tell the others now."""
        return Report(
            rank=self.rank,
            host=self._host,
            pid=self._pid,
            num_calls=self._num_calls,
            num_passed=self._num_passed,
            place=self._place,
            compiling=self._on_gpus and self.at_work and self._task not in self._compiled,
            state=self._state,
            error=self._error,
            idle=self.clock.now() - self._moved,
            silent=0.0,
        )
