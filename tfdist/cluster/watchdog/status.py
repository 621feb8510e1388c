"""The status of a worker, and the report that it sends to other workers."""

from __future__ import annotations

import math
import os
import socket
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tfdist.cluster.messages import printable

#: Time between two reports of a worker, and between two evaluations on rank 0.
HEARTBEAT_SECONDS = 1.0
#: Reports that rank 0 receives per second. With more workers, each reports less often.
REPORTS_PER_SECOND = 400
#: Maximum time between two reports, so that a suspended worker is detected within 30 s.
_MAX_SECONDS = 10.0

#: Maximum lengths of the texts of a report, in characters.
_MAX_HOST, _MAX_PLACE, _MAX_ERROR = 100, 200, 300


def heartbeat_seconds(size: int) -> float:
    """Returns the time between two reports: 1 s up to 400 workers, 10 s from 4,000 on."""
    return min(max(HEARTBEAT_SECONDS, size / REPORTS_PER_SECOND), _MAX_SECONDS)


def missed_seconds(size: int) -> float:
    """Returns the time after which a worker counts as missing: two or three missed reports."""
    return max(3.0, 2.5 * heartbeat_seconds(size))


class State(StrEnum):
    """The state of a worker."""

    UNKNOWN = "no report received"
    RUNNING = "running"
    OUTSIDE = "between two trainer calls"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    ENDED = "exited normally"


_STATES = list(State)


@dataclass(frozen=True, slots=True)
class Report:
    """The latest report of one worker.

    Attributes:
        rank: Its rank.
        host: Its host's name.
        pid: Its process ID.
        num_calls: Number of calls of `fit`, `evaluate` and `predict` that it has started.
        num_passed: Number of progress marks in the current call. All workers' trainers pass the
            same marks.
        place: Description of the last mark, such as "step 7".
        compiling: Whether it may still be compiling GPU kernels, before its first step.
        state: Its state.
        error: The first line of the error that it raised.
        idle: Seconds since it passed the last mark.
        silent: Seconds since its last report.
        connected: Whether its connection is open.
    """

    rank: int
    host: str = "?"
    pid: int = 0
    num_calls: int = 0
    num_passed: int = 0
    place: str = "nothing"
    compiling: bool = False
    state: State = State.UNKNOWN
    error: str = ""
    idle: float = math.inf
    silent: float = math.inf
    connected: bool = True

    @property
    def progress(self) -> tuple[int, int]:
        """The progress of the worker; later values compare greater."""
        return self.num_calls, self.num_passed

    def missed(self, seconds: float) -> bool:
        """Returns whether it has reported before, but not in the last `seconds`."""
        has_reported = self.state is not State.UNKNOWN
        return has_reported and not (self.connected and self.silent < seconds)

    def closed(self) -> Report:
        """Returns a copy of the report with a closed connection."""
        return replace(self, connected=False)

    def aged(self, seconds: float) -> Report:
        """Returns a copy of the report that is `seconds` older."""
        return replace(self, idle=self.idle + seconds, silent=self.silent + seconds)

    def to_message(self) -> list[Any]:
        """Returns the fields to send; the receiver knows the others."""
        return [
            self.host, self.pid, self.num_calls, self.num_passed, self.place, int(self.compiling),
            _STATES.index(self.state), self.error, round(self.idle, 1),
        ]  # fmt: skip

    @staticmethod
    def from_message(rank: int, message: Any) -> Report:
        """Parses a report that was just received.

        Raises:
            ValueError: The message is invalid.
        """
        try:
            host, pid, num_calls, num_passed, place, compiling, state, error, idle = message
            numbers = int(pid), int(num_calls), int(num_passed), int(state), float(idle)
            if min(numbers) < 0 or not math.isfinite(idle) or max(numbers) > 2**53:
                raise ValueError(f"numbers out of range: {numbers}")
            return Report(
                rank=rank,
                host=printable(str(host), _MAX_HOST),
                pid=int(pid),
                num_calls=int(num_calls),
                num_passed=int(num_passed),
                place=printable(str(place), _MAX_PLACE),
                compiling=bool(compiling),
                state=_STATES[int(state)],
                error=printable(str(error), _MAX_ERROR),
                idle=float(idle),
                silent=0.0,
            )
        except (TypeError, IndexError, OverflowError) as error:
            raise ValueError(f"not a report: {error}") from error

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


class Clock:
    """Measures time without the periods in which this process was suspended.

    Suspending a job, or closing a laptop, suspends all workers at the same time. When they
    continue, none of them counts as silent.

    Args:
        tick_seconds: How often `tick` is called while the process runs.
    """

    def __init__(self, tick_seconds: float) -> None:
        self._tick_seconds = tick_seconds
        # The last tick and the seconds lost up to it, in one tuple because other threads read them.
        self._ticked: tuple[float, float] = math.inf, 0.0

    def tick(self) -> None:
        """Removes the time since the last tick, beyond the regular interval, from the count."""
        now = time.monotonic()
        self._ticked = now, now - self._counted(now)

    def now(self) -> float:
        """Returns the time in seconds; only differences are meaningful.

        The time does not advance while a tick is overdue, so that the first reader after a
        suspension does not count the suspension.
        """
        return self._counted(time.monotonic())

    def _counted(self, now: float) -> float:
        ticked, lost = self._ticked
        return min(now, ticked + self._tick_seconds) - lost


class Status:
    """The progress of this worker: written by the trainer, read by the reporting thread.

    Attributes:
        seconds: Maximum time without progress of any worker.
        clock: The clock for all reported times.
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
    def is_running(self) -> bool:
        """Whether the worker is in a trainer call."""
        return self._state is State.RUNNING

    def enter(self, task: str, seconds: float) -> None:
        """Records the start of a trainer call."""
        self.seconds = seconds
        self._num_calls, self._num_passed = self._num_calls + 1, 0
        self._state, self._error = State.RUNNING, ""
        self._task = task
        self.passed(f"the start of {task}")

    def passed(self, place: str) -> None:
        """Records a progress mark. All workers pass the same marks in the same order."""
        self._place, self._moved = place, self.clock.now()
        self._num_passed += 1
        if self._num_passed > 1:  # past the start of the call: the first steps are done
            self._compiled.add(self._task)

    def leave(self, state: State, error: str = "") -> None:
        """Records the end of a trainer call."""
        self._state, self._error, self._moved = state, error, self.clock.now()

    def end(self) -> None:
        """Records a normal exit, unless the process is in a trainer call or has failed."""
        if self._state is State.OUTSIDE:
            self.leave(State.ENDED)

    def report(self) -> Report:
        """Returns the report to send now."""
        return Report(
            rank=self.rank,
            host=self._host[:_MAX_HOST],
            pid=self._pid,
            num_calls=self._num_calls,
            num_passed=self._num_passed,
            place=self._place[:_MAX_PLACE],
            compiling=self._on_gpus and self.is_running and self._task not in self._compiled,
            state=self._state,
            error=self._error[:_MAX_ERROR],
            idle=self.clock.now() - self._moved,
            silent=0.0,
        )
