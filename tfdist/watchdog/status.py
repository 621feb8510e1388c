"""What is known of a worker: its own status, and the report that others get of it."""

from __future__ import annotations

import math
import os
import socket
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tfdist.cluster.messages import printable

#: Time between two reports of a worker, and between two judgements of rank 0.
HEARTBEAT_SECONDS = 1.0
#: Reports that rank 0 receives per second: more workers report less often.
REPORTS_PER_SECOND = 400
#: Longest time between two reports, so that a stopped worker is named within 30 s at any size.
_LONGEST_SECONDS = 10.0

#: Longest texts of a report, in characters.
_MOST_HOST, _MOST_PLACE, _MOST_ERROR = 100, 200, 300


def heartbeat_seconds(size: int) -> float:
    """Returns the time between two reports: 1 s up to 400 workers, 10 s from 4,000 on."""
    return min(max(HEARTBEAT_SECONDS, size / REPORTS_PER_SECOND), _LONGEST_SECONDS)


def missed_seconds(size: int) -> float:
    """Returns the time after which a worker counts as missed: two or three reports."""
    return max(3.0, 2.5 * heartbeat_seconds(size))


class State(StrEnum):
    """What a worker is doing."""

    UNHEARD = "not heard from"
    AT_WORK = "at work"
    OUTSIDE = "between two calls of the trainer"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    ENDED = "exited normally"


_STATES = list(State)


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of one worker.

    Attributes:
        rank: Its rank.
        host: Its host's name.
        pid: Its process ID.
        num_calls: Number of calls of `fit`, `evaluate` and `predict` that it has begun.
        num_passed: Number of marks that it has passed in the last of them; the trainers of all
            workers pass the same marks.
        place: The last of these marks.
        compiling: Whether it may still compile kernels for its GPUs, before its first step.
        state: What it is doing.
        error: The first line of the error that it raised.
        idle: Seconds since it passed that mark.
        silent: Seconds since it was heard from.
        connected: Whether its connection is open.
    """

    rank: int
    host: str = "?"
    pid: int = 0
    num_calls: int = 0
    num_passed: int = 0
    place: str = "nothing"
    compiling: bool = False
    state: State = State.UNHEARD
    error: str = ""
    idle: float = math.inf
    silent: float = math.inf
    connected: bool = True

    @property
    def progress(self) -> tuple[int, int]:
        """How far it is; workers are compared by it."""
        return self.num_calls, self.num_passed

    def missed(self, seconds: float) -> bool:
        """Whether it was heard from once, but not in the last so many seconds."""
        heard = self.state is not State.UNHEARD
        return heard and not (self.connected and self.silent < seconds)

    def closed(self) -> Report:
        """Returns the report with its connection closed."""
        return replace(self, connected=False)

    def aged(self, seconds: float) -> Report:
        """Returns the report as it is so many seconds later."""
        return replace(self, idle=self.idle + seconds, silent=self.silent + seconds)

    def to_message(self) -> list[Any]:
        """Returns what is sent of the report; the receiver knows the rest."""
        return [
            self.host, self.pid, self.num_calls, self.num_passed, self.place, int(self.compiling),
            _STATES.index(self.state), self.error, round(self.idle, 1),
        ]  # fmt: skip

    @staticmethod
    def from_message(rank: int, message: Any) -> Report:
        """Returns the report of a worker that sent it just now.

        Raises:
            ValueError: The message has another form.
        """
        try:
            host, pid, num_calls, num_passed, place, compiling, state, error, idle = message
            numbers = int(pid), int(num_calls), int(num_passed), int(state), float(idle)
            if min(numbers) < 0 or not math.isfinite(idle) or max(numbers) > 2**53:
                raise ValueError(f"numbers out of range: {numbers}")
            return Report(
                rank=rank,
                host=printable(str(host), _MOST_HOST),
                pid=int(pid),
                num_calls=int(num_calls),
                num_passed=int(num_passed),
                place=printable(str(place), _MOST_PLACE),
                compiling=bool(compiling),
                state=_STATES[int(state)],
                error=printable(str(error), _MOST_ERROR),
                idle=float(idle),
                silent=0.0,
            )
        except (TypeError, IndexError, OverflowError) as error:
            raise ValueError(f"no report: {error}") from error

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


class Clock:
    """Measures time without the periods in which this process was stopped.

    A suspended job, or a closed laptop, stops all workers at once. When they continue, none of them
    counts as silent.

    Args:
        tick_seconds: How often `tick` is called while the process runs.
    """

    def __init__(self, tick_seconds: float) -> None:
        self._tick_seconds = tick_seconds
        # The last tick and the seconds lost up to it, replaced together: other threads read them.
        self._ticked: tuple[float, float] = math.inf, 0.0

    def tick(self) -> None:
        """Removes the time since the last tick, beyond the regular interval, from the count."""
        now = time.monotonic()
        self._ticked = now, now - self._counted(now)

    def now(self) -> float:
        """Returns the time in seconds; only differences are meaningful.

        It stands still while a tick is overdue, so that the first reader after a stop does not
        count it.
        """
        return self._counted(time.monotonic())

    def _counted(self, now: float) -> float:
        ticked, lost = self._ticked
        return min(now, ticked + self._tick_seconds) - lost


class Status:
    """How far this worker is: written by the trainer, read by the thread that reports.

    Args:
        rank: Its rank.
        on_gpus: Whether it computes on GPUs.
        size: Number of workers.
        host: Name of its host; empty: this host's.

    Attributes:
        seconds: Longest time without progress of any worker.
        clock: The clock of all times that workers report.
    """

    def __init__(self, rank: int, on_gpus: bool = False, size: int = 1, host: str = "") -> None:
        self.rank, self.seconds = rank, 0.0
        self.clock = Clock(heartbeat_seconds(size))
        self._host, self._pid = host or socket.gethostname(), os.getpid()
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
        """Passes a mark; the trainers of all workers pass the same ones in the same order."""
        self._place, self._moved = place, self.clock.now()
        self._num_passed += 1
        if self._num_passed > 1:  # more than the start of the call: the first steps are done
            self._compiled.add(self._task)

    def leave(self, state: State, error: str = "") -> None:
        """Ends a call of the trainer."""
        self._state, self._error, self._moved = state, error, self.clock.now()

    def end(self) -> None:
        """Marks a normal exit, unless the process is in a call or has failed."""
        if self._state is State.OUTSIDE:
            self.leave(State.ENDED)

    def report(self) -> Report:
        """Returns the report to send now."""
        return Report(
            rank=self.rank,
            host=self._host[:_MOST_HOST],
            pid=self._pid,
            num_calls=self._num_calls,
            num_passed=self._num_passed,
            place=self._place[:_MOST_PLACE],
            compiling=self._on_gpus and self.at_work and self._task not in self._compiled,
            state=self._state,
            error=self._error[:_MOST_ERROR],
            idle=self.clock.now() - self._moved,
            silent=0.0,
        )
