"""Terminates a process that waits too long for other workers, with a specific exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from tfdist.errors import PEER_LOST


@contextmanager
def deadline(seconds: float, give_up: Callable[[], object]) -> Iterator[None]:
    """Calls a function in another thread if the block takes longer than a time limit.

    Args:
        seconds: Time limit of the block.
        give_up: Called after the time limit; reports the reason and terminates this process.
    """
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exit_now(reason: str) -> NoReturn:
    """Prints the reason and the stacks of all threads, and terminates this process.

    It exits without any cleanup, because cleanup could also wait for the other workers.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        print(
            f"error: {reason}\nThis process exits with code {PEER_LOST}. Stacks of its threads:",
            file=sys.stderr,
            flush=True,
        )
        # File descriptor 2, because sys.stderr has no file descriptor in a notebook.
        faulthandler.dump_traceback(2)
    os._exit(PEER_LOST)
