"""The children of a group: waited for, told to stop together, and none left behind."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Sequence
from types import TracebackType

from tfdist.errors import REQUEUE
from tfdist.launcher.child import Child, Failure
from tfdist.launcher.restarts import Restarts
from tfdist.launcher.signals import SignalledError

#: Between SIGTERM and SIGKILL, at most.
_LAST_SECONDS = 5.0


class Children:
    """All of them; leaving the block ends those that still run.

    Args:
        children: Not started yet.
        grace: As for `group.run`.
        restarts: As for `group.run`.

    Attributes:
        well: The names of those that have ended well, in their order.
    """

    def __init__(self, children: Sequence[Child], grace: float, restarts: Restarts) -> None:
        self._children, self._grace, self._restarts = children, grace, restarts
        self._last = min(grace, _LAST_SECONDS)
        self._ended: queue.SimpleQueue[Child] = queue.SimpleQueue()  # in the order of their ends
        self.well: list[str] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            # They may want to save what they have.
            if kind is KeyboardInterrupt:
                self._end(signal.SIGINT, self._grace)
            if isinstance(error, SignalledError):
                self._preempt(error)
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
        while not self.done:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                child = self._ended.get(timeout=left)
            except queue.Empty:
                return None
            if child.code and self._starts_again(child):
                continue
            if child.code == REQUEUE:
                return self._after_preemption(child)
            if child.code:
                return child
            self.well.append(child.process.name)
            if child.process.leads:
                self._wait_for_all(self._grace)
                return None
        return None

    @property
    def done(self) -> bool:
        """Whether all have ended well."""
        return len(self.well) == len(self._children)

    def preempt(self) -> Failure | None:
        """Lets all stop after a step; returns the first failure, or who was preempted first."""
        for child in self._children:
            child.signal(signal.SIGUSR1)
        failed = self.wait(self._grace)
        late = None if self.done else Failure("launcher", REQUEUE, "")  # goes on from what is saved
        return failed.failure() if failed else late

    def last_words(self) -> str:
        """Returns what each said last on standard error."""
        said = {child.process.name: child.failure().last_words for child in self._children}
        return "\n".join(f"{name}: {words}" for name, words in said.items() if words)

    def _starts_again(self, child: Child) -> bool:
        """Starts one that has failed again, if it may."""
        if not child.process.may_return or not self._restarts.allow(child.failure()):
            return False
        child.start(self._ended.put)
        return True

    def _after_preemption(self, first: Child) -> Child:
        """Lets the others save, too; returns one that failed at it, or the one that ended first."""
        self._wait_for_all(self._grace)
        ended = [child for child in self._children if not child.running]
        return next((child for child in ended if child.code not in (0, REQUEUE)), first)

    def _preempt(self, told: SignalledError) -> None:
        """Passes on that the machine is wanted back, to who stops the others."""
        leaders = [child for child in self._children if child.process.leads]
        for child in leaders or self._children:
            child.signal(child.process.preempt_by or told.number)
        self._wait_for_all(self._grace, leaders)
        if any(child.code == REQUEUE for child in self._children if not child.running):
            told.code = REQUEUE

    def _end(self, number: int, seconds: float) -> None:
        """Sends a signal to those that run, and waits for them to end."""
        for child in self._children:
            child.signal(number)
        self._wait_for_all(seconds)

    def _wait_for_all(self, seconds: float, whom: Sequence[Child] = ()) -> None:
        """Waits until none runs, or none of some."""
        deadline = time.monotonic() + seconds
        awaited = whom or self._children
        while any(c.running for c in awaited) and (left := deadline - time.monotonic()) > 0:
            try:
                self._ended.get(timeout=left)
            except queue.Empty:
                return
