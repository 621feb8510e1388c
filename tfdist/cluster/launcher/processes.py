"""Runs the processes of one host as a group: when one fails, all are terminated."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, MappingProxyType, TracebackType
from typing import Protocol, TextIO

from tfdist.cluster.deadline import WAITING_FOLDER, waiting_ranks
from tfdist.cluster.launcher.orphans import marked, watching
from tfdist.cluster.launcher.output import Relay
from tfdist.cluster.launcher.plan import Process
from tfdist.cluster.launcher.restarts import NO_RESTARTS, Failure, Restarts
from tfdist.console import folders, threads
from tfdist.console.streams import say
from tfdist.errors import REQUEUE, TERMINATED, LaunchError, exit_code

#: Maximum time between SIGTERM and SIGKILL.
_TERMINATION_SECONDS = 5.0
_DRAIN_SECONDS = 1.0
#: Interval at which to look for signals, and for workers that wait for one that has ended.
_POLL_SECONDS = 0.5


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_HINT = "\nThe workers are saving. Press Ctrl-C again to kill them.\n"


class SignalledError(SystemExit):
    """A signal that terminates this process, after the other processes have saved a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(exit_code(-number))
        self.number = number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Makes SIGTERM, SIGUSR1 and SIGHUP raise an exception within the block, as Ctrl-C does.

    Only the first signal raises it, because schedulers signal both a job and its processes, and
    workers are saving by then. Only a second Ctrl-C interrupts that. Signals that were ignored
    before the block stay ignored, as after `nohup` and in background jobs. Has no effect outside of
    the main thread, because Python allows signal handlers only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        is_first = not received  # before a further signal interrupts this handler
        received.append(number)
        if number == signal.SIGINT and (is_first or received.count(number) > 1):
            signal.default_int_handler(number, frame)
        if number == signal.SIGINT:
            say(2, _HINT)
        elif is_first:
            raise SignalledError(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in handled:
            signal.signal(number, leave)
        yield
    finally:
        # After a preemption, nothing may change the exit code until the process has ended.
        stays = bool(received) and isinstance(sys.exc_info()[1], SignalledError)
        for number in handled:
            if not stays or number == signal.SIGINT:
                signal.signal(number, before[number])


@dataclass(frozen=True)
class Streams:
    """The streams to which the output of processes is written.

    Attributes:
        only: Name of the only process whose output is shown, without a prefix; None: all processes;
            empty: no process.
        out: Stream for standard output; None: standard output of this process.
        err: Stream for standard error; None: standard error of this process.
    """

    only: str | None = None
    out: TextIO | None = None
    err: TextIO | None = None

    def relay(self, name: str) -> Relay:
        """Returns the relay for the output of a process."""
        if self.only not in (None, name):
            return Relay(name, None, None)
        return Relay("" if self.only else name, self.out or sys.stdout, self.err or sys.stderr)


class Child(Protocol):
    """A process of a group, on this host or another."""

    process: Process

    def start(self, on_end: Callable[[Child], None]) -> None:
        """Starts it.

        Args:
            on_end: Called from a thread when the process has ended.

        Raises:
            LaunchError: The process cannot be started.
        """

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""

    @property
    def code(self) -> int:
        """The exit code of an ended process, as in a shell: 128 plus the number of a signal."""

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children."""

    def failure(self) -> Failure:
        """Returns a description of how the process failed."""


class LocalChild:
    """A process of this host."""

    def __init__(self, process: Process, environ: Mapping[str, str], streams: Streams) -> None:
        self.process = process
        defaults = {"TF_CPP_MIN_LOG_LEVEL": "3"}
        overrides = {"PYTHONUNBUFFERED": "1", **process.environ, **environ}
        self._environ = {**defaults, **os.environ, **overrides}
        self._relay = streams.relay(process.name)
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self, on_end: Callable[[Child], None]) -> None:
        """Starts the process; see `Child`."""
        try:
            popen = subprocess.Popen(
                self.process.command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # the launcher forwards signals of the terminal
            )
        except OSError as error:
            raise LaunchError(
                f"Cannot start {self.process.command[0]!r} ({error.strerror}): "
                "expected a program or a Python script, followed by its arguments."
            ) from None
        self._popen = popen
        self._relay.start(popen)

        def wait() -> None:
            popen.wait()
            on_end(self)

        threads.start(wait)

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._popen is not None and self._popen.returncode is None

    @property
    def code(self) -> int:
        """The exit code of an ended process; see `exit_code`."""
        return exit_code(self._popen.returncode) if self._popen else 0

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        if self._popen and self.running:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._popen.pid, number)

    def finish(self) -> None:
        """Waits for the remaining output; see `Relay.finish`."""
        self._relay.finish()

    def failure(self) -> Failure:
        """Returns a description of how the process failed."""
        if not self.running:
            self._relay.join(_DRAIN_SECONDS)
        return Failure(self.process.name, self.code, self._relay.error_output())


class Children:
    """All processes of a group. Leaving the `with` block terminates the running ones.

    Args:
        children: Processes that have not been started.
        grace: As for `run`.
        restarts: As for `run`.
        waiting_folder: The folder in which workers show that they wait for all others; empty: none.

    Attributes:
        ended: Names of the processes that exited with code 0, in order.
    """

    def __init__(
        self,
        children: Sequence[Child],
        grace: float,
        restarts: Restarts,
        waiting_folder: str = "",
    ) -> None:
        self._children, self._grace, self._restarts = children, grace, restarts
        self._waiting_folder, self._waiting = waiting_folder, set[str]()
        self._termination = min(grace, _TERMINATION_SECONDS)
        self._queue: queue.SimpleQueue[Child] = (
            queue.SimpleQueue()
        )  # children that have ended, in order
        self.ended: list[str] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            # Give the processes time to save a checkpoint.
            if kind is KeyboardInterrupt:
                self._end(signal.SIGINT, self._grace)
            if isinstance(error, SignalledError):
                # Forward a preemption to the process that stops the others, or to all processes.
                chiefs = [child for child in self._children if child.process.ends_run]
                for child in chiefs or self._children:
                    child.signal(child.process.preempt_by or error.number)
                self._wait_for_all(self._grace, chiefs)
                # The others do not know whether it could save.
                chief = (chiefs or self._children)[0]
                if not chief.running and chief.code == REQUEUE:
                    error.code = REQUEUE
            self._end(signal.SIGTERM, self._termination)
        finally:  # a second Ctrl-C skips the waiting
            self._end(signal.SIGKILL, _TERMINATION_SECONDS)

    def start(self) -> None:
        """Starts all.

        Raises:
            LaunchError: One cannot be started.
        """
        for child in self._children:
            child.start(self._queue.put)

    def wait(self, seconds: float | None = None) -> Child | None:
        """Waits for the run to end or for `seconds`. Returns the process that failed, if any.

        Raises:
            LaunchError: A worker has ended before all workers had connected.
        """
        deadline = time.monotonic() + (math.inf if seconds is None else seconds)
        while not self.done:
            child = self._next_ended(deadline)
            if child is None:
                if time.monotonic() >= deadline:
                    return None
                if self.ended and self._waiting_folder:
                    # Does a worker wait, since the last check, for one that has ended?
                    before, self._waiting = self._waiting, waiting_ranks(self._waiting_folder)
                    names = {child.process.name for child in self._children if child.running}
                    if stuck := sorted(names & before & self._waiting, key=int):
                        raise LaunchError(
                            f"rank {', '.join(self.ended)} ended with exit code 0 before all "
                            f"workers had connected, and rank {', '.join(stuck)} waited for it. "
                            "Run the same script on all ranks, and create the strategy or the "
                            "Trainer on each of them."
                        )
                continue
            if child.code and child.process.restartable and self._restarts.allow(child.failure()):
                child.start(self._queue.put)
                continue
            if child.code == REQUEUE:
                self._wait_for_all(self._grace)  # until the others have saved
                ended = [one for one in self._children if not one.running]
                return next((one for one in ended if one.code not in (0, REQUEUE)), child)
            if child.code:
                return child
            self.ended.append(child.process.name)
            if child.process.ends_run:
                self._wait_for_all(self._grace)
                return None
        return None

    @property
    def done(self) -> bool:
        """Whether all processes have exited with code 0."""
        return len(self.ended) == len(self._children)

    def run(
        self, seconds: float | None = None, should_preempt: Callable[[], bool] = lambda: True
    ) -> Failure | None:
        """Waits for the end of the run, and preempts it if `should_preempt` returns True.

        Args:
            seconds: Interval at which `should_preempt` is called; None: never.
            should_preempt: Returns whether all processes should stop after a step, for a restart.

        Returns:
            The first failure or preemption, or None.
        """
        while True:
            if failed := self.wait(seconds):
                return failed.failure()._replace(ended=tuple(self.ended))
            if seconds is None or self.done:
                return None
            if should_preempt():
                return self.preempt()

    def preempt(self) -> Failure | None:
        """Stops all processes after a step. Returns the first failure or preemption."""
        for child in self._children:
            child.signal(signal.SIGUSR1)
        failed = self.wait(self._grace)
        if failed and failed.code not in (REQUEUE, TERMINATED):
            return failed.failure()
        # A restart resumes from the newest checkpoint, if there is one.
        return None if self.done else Failure("launcher", REQUEUE, "")

    def error_output(self) -> str:
        """Returns the last lines on standard error of each process."""
        outputs = {child.process.name: child.failure().error_output for child in self._children}
        return "\n".join(f"{name}: {text}" for name, text in outputs.items() if text)

    def _end(self, number: int, seconds: float) -> None:
        for child in self._children:
            child.signal(number)
        self._wait_for_all(seconds)

    def _wait_for_all(self, seconds: float, children: Sequence[Child] = ()) -> None:
        deadline = time.monotonic() + seconds
        awaited = children or self._children
        while any(c.running for c in awaited) and time.monotonic() < deadline:
            self._next_ended(deadline)

    def _next_ended(self, deadline: float) -> Child | None:
        """Returns a child that has ended, or None after a moment, or at a time of the clock."""
        # A signal that arrives while another one is pending goes to another thread. Its handler
        # runs in this one, but only once it is awake.
        seconds = min(deadline - time.monotonic(), _POLL_SECONDS)
        try:
            return self._queue.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None


def run(
    processes: Sequence[Process],
    *,
    grace: float,
    restarts: Restarts = NO_RESTARTS,
    streams: Streams | None = None,
    seconds: float | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Failure | None:
    """Runs processes until all have ended. If one fails, the others are terminated.

    Args:
        processes: Processes to run on this host.
        grace: Seconds for processes to exit after an interrupt or a preemption, or after the chief
            has ended.
        restarts: Limit of restarts of single processes.
        streams: Streams for their output.
        seconds: Time after which they are preempted; None: never.
        environ: Environment variables of all processes, in addition to this process's and their
            own.

    Returns:
        The first failure, or None.

    Raises:
        KeyboardInterrupt: SIGINT was received. All processes have ended.
        SystemExit: SIGTERM, SIGUSR1 or SIGHUP was received. All processes have ended. The code is
            `REQUEUE` if they saved a checkpoint. Only the first signal counts.
        LaunchError: A program cannot be started.
    """
    running = started(processes, grace=grace, restarts=restarts, streams=streams, environ=environ)
    with signals_raise(), running as children:
        return children.run(seconds)


@contextmanager
def started(
    processes: Sequence[Process],
    *,
    grace: float,
    restarts: Restarts = NO_RESTARTS,
    streams: Streams | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Children]:
    """Starts processes. Leaving the `with` block terminates them and their descendants.

    Args:
        processes: As for `run`, like the other arguments.
        grace: Seconds.
        restarts: Restarts of single processes.
        streams: Streams for their output.
        environ: Environment variables of all processes, in addition to this process's and their
            own.

    Raises:
        LaunchError: A program cannot be started.
    """
    mark = uuid.uuid4().hex
    with folders.temporary() as folder:
        shared = {**environ, **marked(mark), WAITING_FOLDER: folder}
        children = [LocalChild(process, shared, streams or Streams()) for process in processes]
        try:
            with watching(mark, folder), Children(children, grace, restarts, folder) as group:
                group.start()
                yield group
        finally:  # after all processes have ended, so that no pipe is open
            for child in children:
                child.finish()
