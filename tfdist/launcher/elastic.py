"""Which places of this host have a worker, where some may be out of order for a while.

A place is a worker's number on this host, and with it its GPUs. One whose worker is the first to
fail twice in a row is left out. So the run goes on with fewer workers: larger shares of the same
global batches, so the same numbers. After a while all are stopped after a step and start again with
the place taken in; if its worker fails once more, it is left out for twice as long.
"""

from __future__ import annotations

import re

from tfdist.launcher.child import Failure

#: After which a place is tried again, for the first time.
RETRY_SECONDS = 300.0

_NAMED = re.compile(r"error: rank (\d+) ")  # by the watchdog, in the words of who waited for it


class Elastic:
    """The places of a run.

    Args:
        fewest: Workers that the run goes on with.
        most: Places.
        retry_seconds: After which one that is left out is tried again.
    """

    def __init__(self, fewest: int, most: int, retry_seconds: float = RETRY_SECONDS) -> None:
        self._fewest, self._most = fewest, most
        self._retry_seconds = retry_seconds
        self._suspect: int | None = None
        self._left_out: set[int] = set()
        self._on_trial: set[int] = set()

    @property
    def places(self) -> list[int]:
        """Those that have a worker now, by rank."""
        return sorted({*range(self._most)} - self._left_out)

    @property
    def seconds(self) -> float | None:
        """For which the run goes on so; None: to its end, for no place is left out."""
        return self._retry_seconds if self._left_out else None

    def note(self, failure: Failure) -> bool:
        """Hears of the end of an attempt; returns whether that counts as a failure."""
        if failure.preempted:
            self._on_trial, self._left_out = self._left_out, set()
            self._suspect = None
            return True
        place = self._place(failure)
        was_on_trial = place in self._on_trial
        if was_on_trial:
            self._retry_seconds *= 2
        if was_on_trial or place == self._suspect:
            self._leave_out(place)
        self._suspect, self._on_trial = place, set()
        return not was_on_trial

    def _leave_out(self, place: int | None) -> None:
        if place is not None and len(self.places) > self._fewest:
            self._left_out.add(place)

    def _place(self, failure: Failure) -> int | None:
        """Of the worker that failed, or that the others waited for in vain."""
        named = _NAMED.match(failure.last_words)
        rank = int(named[1]) if named else int(failure.name)
        return self.places[rank] if rank < len(self.places) else None
