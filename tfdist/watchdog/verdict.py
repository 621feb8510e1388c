"""Who holds the others up: judged from what every worker told last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

#: How long who has failed or gone is waited for. The others may be about to fail by themselves,
#: with an error that says more, or to be ended by a launcher.
GRACE_SECONDS = 10.0
#: Longest time without a sign of life; a thread that only beats is never that busy.
SILENCE_SECONDS = 30.0
#: Nobody is called alive who was not heard of for so long.
_MISSED_SECONDS = 3.0


class State(StrEnum):
    """What a worker is at."""

    UNHEARD = "not heard of"
    AT_WORK = "at work"
    OUTSIDE = "between two calls of the trainer"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    ENDED = "ended in order"


class Row(BaseModel):
    """What is known of one worker.

    Attributes:
        rank: Its number.
        host: Its host's name.
        pid: Its process.
        visit: How many calls of `fit`, `evaluate` and `predict` it has begun.
        count: Marks that it has passed in the last of them; all workers pass the same ones.
        place: The last mark.
        state: What it is at.
        error: The first line of what it raised.
        idle: Seconds since it passed the last mark.
        silent: Seconds since it was heard of.
        connected: Whether it has a connection.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    rank: int
    host: str = "?"
    pid: int = 0
    visit: int = 0
    count: int = 0
    place: str = "nothing"
    state: State = State.UNHEARD
    error: str = ""
    idle: float = math.inf
    silent: float = math.inf
    connected: bool = True

    @property
    def progress(self) -> tuple[int, int]:
        """How far it is; workers are compared by it."""
        return self.visit, self.count

    @property
    def missed(self) -> bool:
        """Whether it was heard of once, but not of late."""
        heard = self.state is not State.UNHEARD
        return heard and not (self.connected and self.silent < _MISSED_SECONDS)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


def verdict(rows: Sequence[Row], seconds: float) -> str | None:
    """Returns why those at work can only wait, or None while they may still go on.

    Args:
        rows: One for each worker, in any order.
        seconds: For which nobody may have passed a mark.
    """
    visit = max((row.visit for row in rows if row.state is State.AT_WORK), default=None)
    if visit is None:
        return None
    rows = sorted(rows, key=lambda row: row.progress)
    awaited = [row for row in rows if row.state is State.AT_WORK or row.visit < visit]
    reason = (
        _failed([row for row in rows if row.visit == visit], min(seconds, GRACE_SECONDS))
        or _gone(awaited, rows[-1], min(seconds, GRACE_SECONDS))
        or _silent(awaited, rows[-1], min(seconds, SILENCE_SECONDS))
        or _stuck(awaited, rows[-1], seconds)
    )
    return reason and "\n".join([reason, *map(_line, sorted(rows, key=lambda row: row.rank))])


def may_explain(rows: Sequence[Row], rank: int) -> bool:
    """Tells whether an error of a rank may come from another worker's end."""
    visit = max((row.visit for row in rows if row.rank == rank), default=0)
    return any(
        row.state is State.FAILED
        or (row.missed and (row.state is State.AT_WORK or row.visit < visit))
        for row in rows
        if row.rank != rank
    )


def _failed(rows: Sequence[Row], grace: float) -> str | None:
    for row in rows:
        if row.state is State.FAILED and row.idle >= grace:
            return f"{row} failed: {row.error}"
        if row.state is State.INTERRUPTED and row.idle >= grace:
            return f"{row} was interrupted."
    return None


def _gone(awaited: Sequence[Row], first: Row, grace: float) -> str | None:
    for row in awaited:
        if not row.connected and row.silent >= grace:
            if row.state is State.ENDED:
                return f"{row} has ended. {_reached(row, first)}"
            return f"{row} died: its connection closed without a word. {_reached(row, first)}"
    return None


def _silent(awaited: Sequence[Row], first: Row, limit: float) -> str | None:
    for row in awaited:
        if row.connected and row.state is not State.UNHEARD and row.silent >= limit:
            return (
                f"{row} has given no sign of life for {row.silent:.0f} s: it was stopped, or the "
                f"network to it broke. {_reached(row, first)}"
            )
    return None


def _stuck(awaited: Sequence[Row], first: Row, seconds: float) -> str | None:
    """Who is alive, but keeps the others waiting; of who is missed, the others judge in time."""
    if len(awaited) < 2 or min(row.idle for row in awaited) < seconds:
        return None
    if any(row.missed for row in awaited):
        return None
    for row in awaited:
        if row.state is State.UNHEARD:
            return f"rank {row.rank} was never heard of, and the others wait for {seconds:.0f} s."
        if row.progress < first.progress:
            return f"{row} is alive, but has held up the others for {seconds:.0f} s. " + _reached(
                row, first
            )
    return f"No rank has gone on from {first.place} for {seconds:.0f} s, though all are alive."


def _reached(row: Row, first: Row) -> str:
    """How far a worker came, and how far another; `first` is the furthest of all."""
    missed = f", not {first.place}" if row.progress < first.progress else ""
    return f"It reached {row.place}{missed}."


def _line(row: Row) -> str:
    if row.state is State.UNHEARD:
        return f"  rank {row.rank}: {row.state}"
    state = row.state if row.connected else f"{row.state} when its connection closed"
    return (
        f"  {row}: {state}; reached {row.place} {row.idle:.0f} s ago; "
        f"last sign of life {row.silent:.0f} s ago"
    )
