"""Runs the processes of one host as a group: one fails and all end, and none is left."""

from __future__ import annotations

import queue
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MappingProxyType, TracebackType

from tfdist.launcher.child import Child, Failure, Streams
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
    running = started(processes, grace=grace, restarts=restarts, streams=streams)
    with signals_raise(), running as group:
        failed = group.wait()
    return failed.failure()._replace(ended=tuple(group.well)) if failed else None


@contextmanager
def started(
    processes: Sequence[Process],
    *,
    grace: float,
    restarts: int = 0,
    streams: Streams | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Group]:
    """Starts processes; leaving the block ends those that still run, and all that they started.

    Args:
        processes: As for `run`, like those that follow.
        grace: Seconds.
        restarts: Number.
        streams: Where output goes.
        environ: Variables that all have, beside this process's and their own.

    Raises:
        LaunchError: A program cannot be started.
    """
    mark = uuid.uuid4().hex
    shared = {**environ, **marked(mark)}
    children = [Child(process, shared, streams or Streams()) for process in processes]
    try:
        with watching(mark), Group(children, grace, restarts) as group:
            group.start()
            yield group
    finally:  # now that nobody holds a pipe open any more
        for child in children:
            child.drain()


class Group:
    """All of them; leaving the block ends those that still run.

    Args:
        children: Not started yet.
        grace: As for `run`.
        restarts: As for `run`.

    Attributes:
        well: The names of those that have ended well, in their order.
    """

    def __init__(self, children: Sequence[Child], grace: float, restarts: int) -> None:
        self._children, self._grace, self._restarts = children, grace, restarts
        self._last = min(grace, _LAST_SECONDS)
        self._ended: queue.SimpleQueue[Child] = queue.SimpleQueue()  # in the order of their ends
        self._num_restarts: Counter[str] = Counter()
        self.well: list[str] = []

    def __enter__(self) -> Group:
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

    def start(self) -> None:
        """Starts all.

        Raises:
            LaunchError: One cannot be started.
        """
        for child in self._children:
            child.start(self._ended.put)

    def wait(self, seconds: float | None = None) -> Child | None:
        """Waits for the end of the run, or for so long, and returns the one that failed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while len(self.well) < len(self._children):
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                child = self._ended.get(timeout=left)
            except queue.Empty:
                return None
            if child.code and self._starts_again(child):
                continue
            if child.code:
                return child
            self.well.append(child.process.name)
            if child.process.leads:
                self._wait_for_all(self._grace)
                return None
        return None

    def last_words(self) -> str:
        """Returns what each said last on standard error."""
        said = {child.process.name: child.failure().last_words for child in self._children}
        return "\n".join(f"{name}: {words}" for name, words in said.items() if words)

    def _starts_again(self, child: Child) -> bool:
        """Starts one that has failed again, if it may."""
        self._num_restarts[child.process.name] += 1
        too_often = self._num_restarts[child.process.name] > self._restarts
        if too_often or not child.process.may_return:
            return False
        child.start(self._ended.put)
        return True

    @property
    def _running(self) -> bool:
        return any(child.running for child in self._children)

    def _end(self, number: int, seconds: float) -> None:
        """Sends a signal to those that run, and waits for them to end."""
        for child in self._children:
            child.signal(number)
        self._wait_for_all(seconds)

    def _wait_for_all(self, seconds: float) -> None:
        """Waits until none runs."""
        deadline = time.monotonic() + seconds
        while self._running and (left := deadline - time.monotonic()) > 0:
            try:
                self._ended.get(timeout=left)
            except queue.Empty:
                return


@contextmanager
def signals_raise() -> Iterator[None]:
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
