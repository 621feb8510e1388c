"""Signals that end a launcher, which first ends what it has started."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class SignalledError(SystemExit):
    """A signal that ends this process, and asks the others to save what they have."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Within the block SIGTERM, SIGUSR1 and SIGHUP unwind the stack, as Ctrl-C does.

    So does SIGINT where a shell told this process to ignore it, as they do in the background.
    """
    if threading.current_thread() is not threading.main_thread():  # Python lets no other one
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:  # of a terminal that is gone
            raise SystemExit(128 + number)
        raise SignalledError(number)

    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: leave,
        signal.SIGUSR1: leave,
        signal.SIGHUP: leave,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
