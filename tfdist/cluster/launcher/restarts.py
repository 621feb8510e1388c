"""Failures of processes, and restarts after them."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

from tfdist.errors import REQUEUE

#: Seconds until an excluded slot is tried again for the first time.
RETRY_SECONDS = 300.0

#: Matches the failed rank in a watchdog verdict, which is printed by a worker that waited for it.
_NAMED_RANK = re.compile(r"error: rank (\d+) ")


class Failure(NamedTuple):
    """The failure of a process.

    Attributes:
        name: Name of the process.
        code: Exit code as in a shell: 128 plus the signal's number if a signal killed it.
        error_output: The traceback, or the last lines on standard error.
        ended: Names of the processes that had already exited with code 0, in order. The failure may
            be a consequence of their exit.
    """

    name: str
    code: int
    error_output: str
    ended: tuple[str, ...] = ()

    @property
    def preempted(self) -> bool:
        """Whether the run was preempted: it has saved a checkpoint and can be restarted."""
        return self.code == REQUEUE

    def __str__(self) -> str:
        if self.preempted:
            return (
                f"{_with_rank(self.name)} was preempted, and all workers stopped. Run the same "
                "command again to resume."
            )
        how = f"exit code {self.code}"
        if self.code > 128 and self.code - 128 in set(signal.Signals):
            how = f"signal {signal.Signals(self.code - 128).name}"
        output = f":\n{self.error_output}" if self.error_output else "."
        if not self.ended:
            return f"{_with_rank(self.name)} was the first to fail, with {how}{output}"
        first = " and ".join(map(_with_rank, self.ended))
        return (
            f"{first} ended first, with exit code 0; then {_with_rank(self.name)} failed, with "
            f"{how}{output}"
        )


def _with_rank(name: str) -> str:
    return f"rank {name}" if name.isdecimal() else name


class Restarts:
    """Counts the failures and preemptions of a run, and reports each on standard error.

    Args:
        limit: Maximum number of restarts after failures. With 0, there are no restarts after
            preemptions either.

    Attributes:
        failures: Number of restarts after failures.
        preemptions: Number of restarts after preemptions, which has no limit.
        total: Number of all restarts.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.failures = self.preemptions = self.total = 0

    def allow(self, failure: Failure, counts: bool = True) -> bool:
        """Counts a failure, and returns whether to restart."""
        if not self._limit or (counts and not failure.preempted and self.failures == self._limit):
            return False
        self.total += 1
        if failure.preempted:
            self.preemptions += 1
        elif counts:
            self.failures += 1
        print(
            f"{failure}\nRestarting: restart {self.failures} of {self._limit} after failures, "
            f"{self.preemptions} after preemptions.",
            file=sys.stderr,
            flush=True,
        )
        return True


#: No restarts.
NO_RESTARTS = Restarts(0)


def run_with_restarts(
    attempt: Callable[[], Failure | None],
    restarts: Restarts,
    counts: Callable[[Failure], bool] = lambda _: True,
) -> Failure | None:
    """Calls `attempt` until it succeeds or the limit of restarts is reached.

    Args:
        attempt: Starts all processes, on new ports, and waits for their end.
        restarts: The limit.
        counts: Called with each failure; returns whether it counts towards the limit.

    Returns:
        The last failure, or None.
    """
    while (failure := attempt()) is not None:
        if not restarts.allow(failure, counts(failure)):
            return failure
    return None


class Elastic:
    """Chooses the slots of this host that have a worker, excluding slots that keep failing.

    A slot is a local rank with its GPUs. A slot whose worker is the first to fail twice in a row is
    excluded. The run continues with fewer workers: the global batches stay the same, and the
    per-replica batches become larger. After `retry_seconds`, all workers stop after a step and
    restart with the slot included. If its worker fails again, the slot is excluded for twice as
    long.

    Args:
        min_workers: Minimum number of workers; no further slot is excluded then.
        max_workers: Number of slots.
        retry_seconds: Time until an excluded slot is tried again.
    """

    def __init__(
        self, min_workers: int, max_workers: int, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._min_workers, self._max_workers = min_workers, max_workers
        self._retry_seconds = retry_seconds
        self._suspect: int | None = None
        self._excluded: set[int] = set()
        self._on_trial: set[int] = set()

    @property
    def slots(self) -> list[int]:
        """The slots that have a worker now, by rank."""
        return sorted({*range(self._max_workers)} - self._excluded)

    @property
    def seconds(self) -> float | None:
        """Time until workers are stopped to retry excluded slots; None if no slot is excluded."""
        return self._retry_seconds if self._excluded else None

    def note(self, failure: Failure) -> bool:
        """Records a failure. Returns whether it counts towards the limit of restarts."""
        if failure.preempted:
            self._on_trial, self._excluded = self._excluded, set()
            self._suspect = None
            return True
        named = _NAMED_RANK.match(failure.error_output)
        rank = int(named[1]) if named else int(failure.name)
        slot = self.slots[rank] if rank < len(self.slots) else None
        was_on_trial = slot in self._on_trial
        if was_on_trial:
            self._retry_seconds *= 2
        failed_again = was_on_trial or slot == self._suspect
        if failed_again and slot is not None and len(self.slots) > self._min_workers:
            self._excluded.add(slot)
        self._suspect, self._on_trial = slot, set()
        return not was_on_trial
