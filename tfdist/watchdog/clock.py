"""Time as long as this process runs."""

from __future__ import annotations

import math
import time


class Clock:
    """Seconds, without those in which this process was stopped.

    A job that is suspended, or a laptop that is closed, stops all workers at once. When they go on
    none of them has been silent.

    Args:
        tick_seconds: How often `tick` is called, as long as the process runs.
    """

    def __init__(self, tick_seconds: float) -> None:
        self._tick_seconds = tick_seconds
        # The last tick and the seconds lost up to it, replaced together: other threads read them.
        self._ticked: tuple[float, float] = math.inf, 0.0

    def tick(self) -> None:
        """Takes what lies between two ticks, beyond what should, out of the count."""
        now = time.monotonic()
        self._ticked = now, now - self._counted(now)

    def now(self) -> float:
        """Returns the time, of which only differences mean something.

        It stands still where a tick is due: who is first to ask after a stop must not count it.
        """
        return self._counted(time.monotonic())

    def _counted(self, now: float) -> float:
        ticked, lost = self._ticked
        return min(now, ticked + self._tick_seconds) - lost
