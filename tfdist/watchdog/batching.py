"""An event loop that takes the messages of many workers together, with fewer wake-ups."""

from __future__ import annotations

import asyncio
import selectors
import time
from selectors import SelectorKey

#: Jobs in which every message is handled at once.
SMALL_JOB = 64
#: Time in which messages of a larger job accumulate. A call of the trainer waits this long at its
#: end, for its last report to leave.
_BATCH_SECONDS = 0.02


class _BatchingSelector(selectors.DefaultSelector):
    """Waits a moment before it looks for events, so that it finds several of them."""

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """Returns the events; `selectors.BaseSelector.select` describes the argument."""
        waits = _BATCH_SECONDS if timeout is None else min(timeout, _BATCH_SECONDS)
        if waits > 0:
            time.sleep(waits)
        return super().select(None if timeout is None else max(0.0, timeout - waits))


def event_loop(size: int) -> asyncio.AbstractEventLoop:
    """Returns a new event loop for the watchdog of so many workers."""
    if size <= SMALL_JOB:
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(_BatchingSelector())
