"""Processes forked from one that has imported TensorFlow, monitored and signaled on time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tfdist.cluster.launcher import plan
from tfdist.cluster.launcher.plan import LOCAL, slots

#: Time-out of an attempt on a busy machine, in seconds.
SECONDS = 300.0
#: Seconds between a kill and that of the other workers, as by a launcher.
_FOLLOWERS_SECONDS = 0.5

#: Reports a mark to the parent process.
Report = Callable[[str], None]
Body = Callable[[Report], None]


class Moment(NamedTuple):
    """When a process is sent a signal.

    Attributes:
        phase: Description for reports.
        rank: Rank of the process.
        mark: The mark to wait for: `fork`, `begin`, `step`, `save`, `evaluation`.
        count: Which occurrence of the mark, from 1.
        delay: Seconds after the mark.
    """

    phase: str
    rank: int
    mark: str
    count: int
    delay: float


class Forked:
    """A child process that runs a function.

    Attributes:
        marks: Marks that it has reported.
        code: Exit code; negative for a signal; None while it runs.
    """

    def __init__(self, body: Body, environ: dict[str, str], log: Path) -> None:
        tasks = Path("/proc/self/task").iterdir()
        threads = [(task / "comm").read_text().strip() for task in tasks]
        # jemalloc, which pyarrow brings along, starts its thread again in the child.
        others = [name for name in threads[1:] if name != "jemalloc_bg_thd"]
        assert not others, f"a fork would lose the threads {others}"
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            _live(body, environ, log, writer)
        os.close(writer)
        self.pipe = reader
        self.code: int | None = None
        self.marks = ["fork"]
        self._rest = b""

    def read_marks(self) -> None:
        """Reads the marks that it has reported."""
        *lines, self._rest = (self._rest + os.read(self.pipe, 1 << 16)).split(b"\n")
        self.marks += [line.decode() for line in lines]

    def signal(self, number: int) -> None:
        """Sends a signal, unless the process has just ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def ended(self) -> bool:
        """Returns whether it has ended, after reading all its marks."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.read_marks()
                os.close(self.pipe)
        return self.code is not None


def _live(body: Body, environ: dict[str, str], log: Path, writer: int) -> None:
    """Runs in the child; never returns."""
    code = 1
    try:
        os.environ.update(environ)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)

        def report(mark: str) -> None:
            os.write(writer, f"{mark}\n".encode())

        body(report)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Group:
    """The workers of one attempt, and Horovod's rendezvous server.

    Args:
        body: Function that each worker runs.
        num_workers: Number of workers.
        logs: Folder for their output.
    """

    def __init__(self, body: Body, num_workers: int, logs: Path) -> None:
        environs: list[dict[str, str]] = [{}]
        self._helpers: list[Forked] = []
        if num_workers > 1:
            places = slots({LOCAL: num_workers})
            planned = plan.workers(["true"], places)
            environs = [dict(process.environ) for process in planned.processes]
            port = int(planned.rendezvous.rpartition(":")[2])

            def serve(_: Report) -> None:
                with plan.horovod_rendezvous(places, port):
                    signal.pause()

            self._helpers = [Forked(serve, {}, logs / "server.log")]
        self.children = [
            Forked(body, environ, logs / f"rank-{rank}.log")
            for rank, environ in enumerate(environs)
        ]
        self.sent_at = 0.0

    def run(self, moment: Moment | None, number: int = signal.SIGKILL) -> None:
        """Waits until all processes except a stopped one end. Sets `sent_at` at the signal."""
        due = None
        deadline = time.monotonic() + SECONDS
        try:
            while awaited := [c for c in self.children if not c.ended() and not self._stopped(c)]:
                now = time.monotonic()
                assert now < deadline, [child.marks[-1] for child in self.children]
                if moment and not self.sent_at:
                    victim = self.children[moment.rank]
                    if due is None and victim.marks.count(moment.mark) >= moment.count:
                        due = now + moment.delay
                    if due is not None and now >= due and victim.code is None:
                        victim.signal(number)
                        self.sent_at, self._stops = now, number == signal.SIGSTOP
                        self._victim = victim
                killed = self.sent_at and number == signal.SIGKILL
                if killed and now > self.sent_at + _FOLLOWERS_SECONDS:
                    return
                self._listen(awaited, due if due is not None and not self.sent_at else now + 0.02)
        finally:
            self._end()

    def _stopped(self, child: Forked) -> bool:
        return bool(self.sent_at) and self._stops and child is self._victim

    def _listen(self, awaited: list[Forked], until: float) -> None:
        pipes = {child.pipe: child for child in awaited if child.code is None}
        left = min(0.02, max(0.0, until - time.monotonic()))
        ready, _, _ = select.select(list(pipes), [], [], left)
        for pipe in ready:
            pipes[pipe].read_marks()
        if ready:
            time.sleep(0.0005)

    def _end(self) -> None:
        processes = [*self.children, *self._helpers]
        for child in processes:
            if child.code is None:
                child.signal(signal.SIGKILL)
        while not all(child.ended() for child in processes):
            time.sleep(0.005)
