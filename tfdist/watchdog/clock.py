"""Time as long as this process runs."""

from __future__ import annotations

import time


class Clock:
    """Seconds, without those in which this process was stopped.

    A job that is suspended, or a laptop that is closed, stops all workers at once. When they go on
    none of them has been silent.

    Args:
        tick_seconds: How often `tick` is called, as long as the process runs.
    """

    def __init__(self, tick_seconds: float) -> None:
        self._tick_seconds, self._lost = tick_seconds, 0.0
        self._ticked: float | None = None

    def tick(self) -> None:
        """Takes what lies between two ticks, beyond what should, out of the count."""
        now = time.monotonic()
        if self._ticked is not None:
            self._lost += max(0.0, now - self._ticked - self._tick_seconds)
        self._ticked = now

    def now(self) -> float:
        """Returns the time, of which only differences mean something."""
        return time.monotonic() - self._lost
