"""Runs the processes of one host as a group: one fails and all end, and none is left."""

from __future__ import annotations

import queue
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType

from tfdist.launcher.child import Failure, Member, Streams
from tfdist.launcher.orphans import marked, watching
from tfdist.launcher.plan import Process

#: Between SIGTERM and SIGKILL, at most.
_LAST_SECONDS = 5.0


def run(
    processes: Sequence[Process], *, grace: float, restarts: int = 0, streams: Streams | None = None
) -> Failure | None:
    """Runs processes until all have ended, or one fails and the others are ended.

    Args:
        processes: All on this host.
        grace: Seconds that they have to end by themselves after an interrupt, or after the one
            that leads has ended.
        restarts: How often each of those that may return is started again.
        streams: Where their output goes.

    Returns:
        The first failure, or None.

    Raises:
        KeyboardInterrupt: SIGINT came; they have been ended.
        SystemExit: SIGTERM or SIGHUP came; they have been ended.
        LaunchError: A program cannot be started.
    """
    mark = uuid.uuid4().hex
    members = [Member(process, marked(mark), streams or Streams()) for process in processes]
    try:
        with _signals_raise(), watching(mark), _Group(members, grace, restarts) as group:
            failed = group.wait()
    finally:  # now that nobody holds a pipe open any more
        for member in members:
            member.drain()
    return failed.failure() if failed else None


class _Group:
    """All of them; leaving the block ends those that still run."""

    def __init__(self, members: Sequence[Member], grace: float, restarts: int) -> None:
        self._members, self._grace, self._restarts = members, grace, restarts
        self._last = min(grace, _LAST_SECONDS)
        self._ended: queue.SimpleQueue[Member] = queue.SimpleQueue()  # in the order of their ends
        self._returns: Counter[str] = Counter()

    def __enter__(self) -> _Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if kind is KeyboardInterrupt:  # they may want to save what they have
                self._end(signal.SIGINT, self._grace)
            self._end(signal.SIGTERM, self._last)
        finally:  # a second Ctrl-C comes here at once
            self._end(signal.SIGKILL, _LAST_SECONDS)

    def wait(self) -> Member | None:
        """Starts all, waits for the end of the run, and returns the one that failed."""
        for member in self._members:
            member.start(self._ended.put)
        num_left = len(self._members)
        while num_left:
            member = self._ended.get()
            if member.code and self._starts_again(member):
                continue
            if member.code:
                return member
            if member.process.leads:
                self._wait(self._grace)
                return None
            num_left -= 1
        return None

    def _starts_again(self, member: Member) -> bool:
        """Starts one that has failed again, if it may."""
        self._returns[member.process.name] += 1
        if not member.process.may_return or self._returns[member.process.name] > self._restarts:
            return False
        member.start(self._ended.put)
        return True

    @property
    def _running(self) -> bool:
        return any(member.running for member in self._members)

    def _end(self, number: int, seconds: float) -> None:
        """Sends a signal to those that run, and waits for them to end."""
        for member in self._members:
            member.signal(number)
        self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        """Waits until none runs."""
        deadline = time.monotonic() + seconds
        while self._running and (left := deadline - time.monotonic()) > 0:
            try:
                self._ended.get(timeout=left)
            except queue.Empty:
                return


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP unwind the stack, as Ctrl-C does.

    So does SIGINT where a shell told this process to ignore it, as they do in the background.
    """
    if threading.current_thread() is not threading.main_thread():  # Python lets no other one
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: leave,
        signal.SIGHUP: leave,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
