"""Waits for another process."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    """Waits until a condition holds, and fails on a time-out."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"timed out after {seconds:.0f} s"
        time.sleep(0.05)
