"""Ends a wait that no exception ends: that for other workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def deadline(seconds: float, give_up: Callable[[], object]) -> Iterator[None]:
    """Calls a function, in a thread of its own, where the block takes longer.

    Args:
        seconds: How long the block may take.
        give_up: Says so and ends this process.
    """
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
