"""An event loop that handles the messages of many workers in batches, with fewer wake-ups."""

from __future__ import annotations

import asyncio
import selectors
import time
from selectors import SelectorKey

#: Up to this number of workers, every message is handled immediately.
SMALL_JOB = 64
#: Time during which messages of a larger job are collected. At the end of each trainer call,
#: sending the last report is delayed by this time.
_BATCH_SECONDS = 0.02


class _BatchingSelector(selectors.DefaultSelector):
    """Waits before it polls for events, so that it finds several at once."""

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        """Returns the events; see `selectors.BaseSelector.select`."""
        delay = _BATCH_SECONDS if timeout is None else min(timeout, _BATCH_SECONDS)
        if delay > 0:
            time.sleep(delay)
        return super().select(None if timeout is None else max(0.0, timeout - delay))


def event_loop(size: int) -> asyncio.AbstractEventLoop:
    """Returns a new event loop for the watchdog of `size` workers."""
    if size <= SMALL_JOB:
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(_BatchingSelector())
