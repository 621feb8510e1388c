"""Threads whose errors end the run.

By default, Python only prints the error of a thread, and whatever waits for the thread may wait
forever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from tfdist.console import tracebacks

_errors: list[BaseException] = []


def start(
    function: Callable[..., Any], *arguments: Any, name: str | None = None
) -> threading.Thread:
    """Calls a function in a daemon thread, and returns it; see `fail` for what an error does."""

    def run() -> None:
        try:
            function(*arguments)
        except Exception as error:
            fail(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def fail(error: BaseException) -> None:
    """Prints an error of a thread, and interrupts the main thread as Ctrl-C does.

    Workers save and exit, and `console.command.run` returns 1. Without a handler of Ctrl-C, as in a
    background job, the process exits with code 1.
    """
    _errors.append(error)
    with contextlib.suppress(OSError, ValueError):
        print(tracebacks.folded(error), end="", file=sys.stderr, flush=True)
    if not callable(signal.getsignal(signal.SIGINT)):
        os._exit(1)
    main_thread = threading.main_thread()
    if main_thread.ident is not None and main_thread.is_alive():
        signal.pthread_kill(main_thread.ident, signal.SIGINT)


def failed() -> bool:
    """Returns whether a thread has ended by an error, which is printed."""
    return bool(_errors)
