"""Failures of processes, and what is restarted after them."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

from tfdist.errors import REQUEUE

#: Seconds until an excluded slot is tried again for the first time.
RETRY_SECONDS = 300.0

#: How the watchdog's verdict, in the output of a worker that waited, names the rank at fault.
_NAMED = re.compile(r"error: rank (\d+) ")


class Failure(NamedTuple):
    """A process that failed.

    Attributes:
        name: Its name.
        code: Its exit code as in a shell: 128 plus the signal's number, if a signal killed it.
        last_words: Its traceback, or its last lines on standard error.
        ended: Names of the processes that had exited with code 0 before, in order: the failure may
            be a consequence.
    """

    name: str
    code: int
    last_words: str
    ended: tuple[str, ...] = ()

    @property
    def preempted(self) -> bool:
        """Whether the run has saved its state and wants to be started again."""
        return self.code == REQUEUE

    def __str__(self) -> str:
        if self.preempted:
            return (
                f"{_with_rank(self.name)} was preempted, and all workers stopped: run the same "
                "command again to resume."
            )
        how = f"exit code {self.code}"
        if self.code > 128 and self.code - 128 in set(signal.Signals):
            how = f"signal {signal.Signals(self.code - 128).name}"
        words = f":\n{self.last_words}" if self.last_words else "."
        if not self.ended:
            return f"{_with_rank(self.name)} was the first to fail, with {how}{words}"
        first = " and ".join(map(_with_rank, self.ended))
        return (
            f"{first} ended first, with exit code 0; then {_with_rank(self.name)} failed, with "
            f"{how}{words}"
        )


def _with_rank(name: str) -> str:
    return f"rank {name}" if name.isdecimal() else name


class Restarts:
    """Counts the failures and preemptions of a run, and reports each on standard error.

    Args:
        limit: Number of failures that are followed by a restart. 0: nothing is restarted, not even
            after a preemption.

    Attributes:
        failures: Failures that were followed by a restart.
        preemptions: Preemptions that were followed by a restart; they have no limit.
        total: All restarts.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.failures = self.preemptions = self.total = 0

    def allow(self, failure: Failure, counts: bool = True) -> bool:
        """Counts a failure, and returns whether a restart follows.

        Args:
            failure: A failure or preemption.
            counts: Whether the limit applies to it.
        """
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


#: Restarts nothing.
NO_RESTARTS = Restarts(0)


def run_with_restarts(
    attempt: Callable[[], Failure | None],
    restarts: Restarts,
    counts: Callable[[Failure], bool] = lambda _: True,
) -> Failure | None:
    """Makes attempts until one succeeds or no restart is allowed.

    Args:
        attempt: Starts all processes, on new ports, and waits for their end.
        restarts: The limit.
        counts: Called with each failure; returns whether the limit applies to it.

    Returns:
        The last failure, or None.
    """
    while (failure := attempt()) is not None:
        if not restarts.allow(failure, counts(failure)):
            return failure
    return None


class Elastic:
    """Which slots of this host have a worker, where some may be broken for a while.

    A slot is a worker's local rank, and with it its GPUs. A slot whose worker is the first to fail
    twice in a row is excluded, and the run continues with fewer workers: larger per-replica batches
    of the same global batches. After a while all workers stop after a step and restart with the
    slot included; if its worker fails again, it is excluded for twice as long.

    Args:
        fewest: Number of workers below which no slot is excluded.
        most: Number of slots.
        retry_seconds: Time until an excluded slot is tried again.
    """

    def __init__(self, fewest: int, most: int, retry_seconds: float = RETRY_SECONDS) -> None:
        self._fewest, self._most = fewest, most
        self._retry_seconds = retry_seconds
        self._suspect: int | None = None
        self._excluded: set[int] = set()
        self._on_trial: set[int] = set()

    @property
    def slots(self) -> list[int]:
        """The slots that have a worker now, by rank."""
        return sorted({*range(self._most)} - self._excluded)

    @property
    def seconds(self) -> float | None:
        """Time until all workers are stopped to try excluded slots; None: there are none."""
        return self._retry_seconds if self._excluded else None

    def note(self, failure: Failure) -> bool:
        """Takes note of a failure; returns whether the limit of restarts applies to it."""
        if failure.preempted:
            self._on_trial, self._excluded = self._excluded, set()
            self._suspect = None
            return True
        slot = self._slot(failure)
        was_on_trial = slot in self._on_trial
        if was_on_trial:
            self._retry_seconds *= 2
        if was_on_trial or slot == self._suspect:
            self._exclude(slot)
        self._suspect, self._on_trial = slot, set()
        return not was_on_trial

    def _exclude(self, slot: int | None) -> None:
        if slot is not None and len(self.slots) > self._fewest:
            self._excluded.add(slot)

    def _slot(self, failure: Failure) -> int | None:
        """Returns the slot of the worker that failed, or that the others waited for."""
        named = _NAMED.match(failure.last_words)
        rank = int(named[1]) if named else int(failure.name)
        return self.slots[rank] if rank < len(self.slots) else None
