"""What is known of a worker."""

from __future__ import annotations

import math
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

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


class Report(BaseModel):
    """What is known of one worker.

    Attributes:
        rank: Its number.
        host: Its host's name.
        pid: Its process.
        num_calls: How many calls of `fit`, `evaluate` and `predict` it has begun.
        num_passed: Places that it has passed in the last of them; all workers pass the same ones.
        place: The last of these.
        compiling: Whether it may still compile kernels for its GPUs, before its first step.
        state: What it is at.
        error: The first line of what it raised.
        idle: Seconds since it passed that place.
        silent: Seconds since it was heard of.
        connected: Whether it has a connection.
    """

    model_config = ConfigDict(frozen=True)

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

    @property
    def missed(self) -> bool:
        """Whether it was heard of once, but not of late."""
        heard = self.state is not State.UNHEARD
        return heard and not (self.connected and self.silent < _MISSED_SECONDS)

    def aged(self, seconds: float) -> Report:
        """Returns what came so many seconds ago, as it is now."""
        older = {"idle": self.idle + seconds, "silent": self.silent + seconds}
        return self.model_copy(update=older)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"
