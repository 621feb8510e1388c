"""Ends a process that waits for other workers: with a time limit, and its own exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

#: Tells launchers that not this worker failed, but one that it waited for.
EXIT_CODE = 75


@contextmanager
def deadline(seconds: float, give_up: Callable[[], object]) -> Iterator[None]:
    """Calls a function, in another thread, if the block takes longer.

    Args:
        seconds: Time limit of the block.
        give_up: Called then; reports the reason and ends this process.
    """
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exit_now(reason: str) -> NoReturn:
    """Prints the reason and the stacks of all threads, and ends this process.

    It ends without any cleanup, which would wait for the other workers as well.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        print(
            f"error: {reason}\nThis process ends with code {EXIT_CODE}. Stacks of its threads:",
            file=sys.stderr,
            flush=True,
        )
        # File descriptor 2 instead of sys.stderr, which has none in a notebook.
        faulthandler.dump_traceback(2)
    os._exit(EXIT_CODE)
