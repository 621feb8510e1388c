"""Simulates the watchdog of thousands of workers: `python -m tests.studies.watchdog`.

Rank 0 runs in one process and the other workers in a few others, on real sockets and with the code
of a real training. Prints the time until all workers have joined, the cost on rank 0 without
faults, and the time until each kind of fault is detected.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import random
import re
import resource
import socket
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil

from tfdist.cluster.watchdog.heartbeat import event_loop
from tfdist.cluster.watchdog.protocol import Coordinator, Reporter
from tfdist.cluster.watchdog.status import Status
from tfdist.cluster.watchdog.verdict import SILENCE_SECONDS

_KEY = b"simulation"
_HOST = "127.0.0.1"
_WORKERS_PER_HOST = 8
_STEP_SECONDS = 1.0
#: Seconds without progress after which a worker counts as lagging.
_LIMIT = 25.0
_END_SECONDS = 60.0
_JOIN_SECONDS = 120.0
#: Faults, each with the number of affected workers.
FAULTS = ("1 killed", "1 stopped", "1 lagging", "100 killed")


class Outcome(NamedTuple):
    """Measurements of a simulation.

    Attributes:
        join_seconds: Time until rank 0 has a report of every worker.
        cpu: Share of a core that rank 0 used without faults.
        sent: Bytes per second that rank 0 sent meanwhile.
        received: Bytes per second that rank 0 received meanwhile.
        memory: Bytes of rank 0's process.
        detection_seconds: Time until rank 0 had a verdict, by fault; None if it named another rank.
        verdicts: Verdict by fault.
        num_informed: Number of other workers that received the verdict, by fault.
    """

    join_seconds: float
    cpu: float
    sent: float
    received: float
    memory: int
    detection_seconds: dict[str, float | None]
    verdicts: dict[str, str]
    num_informed: dict[str, int]


class _Worker:
    """A simulated worker."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.status = Status(rank, size=size, host=f"node{rank // _WORKERS_PER_HOST:03d}")
        self.waits, self.verdicts = False, 0
        self.reporter = Reporter(self.status, size, [_HOST], port, _KEY, self._on_verdict)
        self.task: asyncio.Task[None] | None = None

    def cause(self, fault: str) -> None:
        """Causes a fault."""
        connection = self.reporter._connection
        if fault == "lagging":
            self.waits = True
        elif self.task and connection and connection.transport:
            self.task.cancel()
            if fault == "killed":
                connection.transport.abort()
            else:  # its sockets stay open, and nobody reads
                connection.transport.pause_reading()

    def reach_end_of_step(self) -> None:
        """Ends the step in which a worker lags."""
        _reach_end_of_step(self.status)

    def _on_verdict(self, reason: str) -> None:
        del reason
        self.verdicts += 1


def _reach_end_of_step(status: Status) -> None:
    """Passes the point at which all wait; the simulated workers do not count steps together."""
    status._num_passed = 10**6
    status.passed("the next step")


async def _workers(ranks: range, size: int, port: int, parent: Connection) -> None:
    """Runs some of the workers until the parent has closed the connection."""
    workers = {rank: _Worker(rank, size, port) for rank in ranks}
    for worker in workers.values():
        worker.status.enter("fit", _LIMIT)
        worker.task = asyncio.create_task(worker.reporter.run())
    step = 0
    while True:
        while parent.poll():
            try:
                fault, victims = parent.recv()
            except EOFError:
                return
            if fault == "count":
                parent.send(sum(worker.verdicts > 0 for worker in workers.values()))
            for rank, worker in workers.items():
                if rank in victims:
                    worker.cause(fault)
                elif fault == "lagging":  # the others wait at the end of the step
                    worker.reach_end_of_step()
                    worker.waits = True
        await asyncio.sleep(_STEP_SECONDS)
        step += 1
        for worker in workers.values():
            if not worker.waits:
                worker.status.passed(f"step {step} of epoch 1")


def _run_workers(ranks: range, size: int, port: int, parent: Connection) -> None:
    _allow_files()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_workers(ranks, size, port, parent))
    os._exit(0)


def _allow_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Run:
    """One group of workers, which runs for a while and then has a fault."""

    def __init__(self, size: int, processes: int) -> None:
        self.size = size
        self._listener = socket.create_server((_HOST, 0))
        port = self._listener.getsockname()[1]
        self._pipes, self._children = [], []
        context = multiprocessing.get_context("spawn")
        bounds = [1 + (size - 1) * i // processes for i in range(processes + 1)]
        for low, high in itertools.pairwise(bounds):
            ours, theirs = context.Pipe()
            child = context.Process(
                target=_run_workers, args=(range(low, high), size, port, theirs), daemon=True
            )
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)
        self.status = Status(0, size=size, host="node000")
        self.verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.coordinator = Coordinator(self.status, size, self._listener, _KEY, self._on_verdict)
        self.status.enter("fit", _LIMIT)
        self._tasks = [
            asyncio.create_task(self.coordinator.run()),
            asyncio.create_task(self._steps()),
        ]

    async def join(self) -> float:
        """Returns the time from the first connection until all workers have reported."""
        first = None
        deadline = time.monotonic() + _JOIN_SECONDS
        while time.monotonic() < deadline:
            joined = len(self.coordinator._connections)
            if joined and first is None:
                first = time.monotonic()
            if joined == self.size - 1:
                return time.monotonic() - (first or time.monotonic())
            await asyncio.sleep(0.02)
        raise TimeoutError(f"{joined} of {self.size - 1} workers joined in {_JOIN_SECONDS:.0f} s")

    async def measure(self, seconds: float) -> tuple[float, float, float]:
        """Returns rank 0's share of a core, and the bytes per second it sent and received."""
        began, cpu = time.monotonic(), time.process_time()
        sent, received = self.coordinator.sent, self.coordinator.received
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        return (
            (time.process_time() - cpu) / took,
            (self.coordinator.sent - sent) / took,
            (self.coordinator.received - received) / took,
        )

    async def cause(self, fault: str, victims: list[int]) -> tuple[float, str, int]:
        """Returns the time until the verdict, the verdict, and how many workers received it."""
        kind = fault.split()[1]
        began = time.monotonic()
        for pipe in self._pipes:
            pipe.send((kind, victims))
        if kind == "lagging":
            self._tasks[1].cancel()
            _reach_end_of_step(self.status)
        text = await asyncio.wait_for(self.verdict, _END_SECONDS)
        took = time.monotonic() - began
        await asyncio.sleep(3 * _STEP_SECONDS)
        for pipe in self._pipes:
            pipe.send(("count", []))
        counts = [await asyncio.to_thread(pipe.recv) for pipe in self._pipes]
        return took, text, sum(counts)

    async def end(self) -> None:
        """Ends all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.kill()
            child.join()

    async def _steps(self) -> None:
        step = 0
        while True:
            await asyncio.sleep(_STEP_SECONDS)
            step += 1
            self.status.passed(f"step {step} of epoch 1")

    def _on_verdict(self, reason: str) -> None:
        if not self.verdict.done():
            self.verdict.set_result(reason)


async def simulate(
    size: int, processes: int = 2, seconds: float = 20.0, faults: tuple[str, ...] = FAULTS
) -> Outcome:
    """Simulates workers, once for each fault.

    Args:
        size: Number of workers, with rank 0.
        processes: Processes of the other workers.
        seconds: Time for which rank 0's cost is measured.
        faults: Which of `FAULTS`.
    """
    _allow_files()
    named: dict[str, float | None] = {}
    verdicts: dict[str, str] = {}
    num_informed: dict[str, int] = {}
    first: tuple[Any, ...] = ()
    for fault in faults:
        run = _Run(size, processes)
        try:
            joined = await run.join()
            first = first or (
                joined,
                *await run.measure(seconds),
                psutil.Process().memory_info().rss,
            )
            number = min(int(fault.split()[0]), size // 2)
            begin = random.Random(size).randrange(1, size - number)
            victims = list(range(begin, begin + number))
            took, text, counted = await run.cause(fault, victims)
            culprit = re.match(r"rank (\d+) ", text)
            named[fault] = took if culprit and int(culprit[1]) in victims else None
            verdicts[fault], num_informed[fault] = text, counted
        finally:
            await run.end()
    return Outcome(*first, named, verdicts, num_informed)


def main() -> int:
    """Prints a table; returns 1 if a goal is missed."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--workers", type=int, nargs="+", default=[64, 512, 4096])
    flags.add_argument("--processes", type=int, default=2, help="of the other workers (2)")
    flags.add_argument("--seconds", type=float, default=20.0, help="of measuring (20)")
    flags.add_argument("--verdicts", action="store_true", help="print the verdicts")
    given = flags.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    head = ["workers", "join s", "CPU %", "sent MB/s", "received MB/s", "memory MB", *FAULTS]
    print(" | ".join(head))
    missed = 0
    for size in given.workers:
        with asyncio.Runner(loop_factory=partial(event_loop, size)) as runner:
            outcome = runner.run(simulate(size, given.processes, given.seconds))
        times = [outcome.detection_seconds[fault] for fault in FAULTS]
        cells = [
            f"{size}", f"{outcome.join_seconds:.2f}", f"{100 * outcome.cpu:.2f}",
            f"{outcome.sent / 1e6:.3f}", f"{outcome.received / 1e6:.3f}",
            f"{outcome.memory / 2**20:.0f}",
            *("another rank" if s is None else f"{s:.1f} s" for s in times),
        ]  # fmt: skip
        print(" | ".join(cells), flush=True)
        missed += any(s is None or s > SILENCE_SECONDS for s in times)
        for fault, text in outcome.verdicts.items():
            lines = text.splitlines()
            print(
                f"  {fault}: {len(lines)} lines, sent to {outcome.num_informed[fault]}: {lines[0]}"
            )
            if given.verdicts:
                print("\n".join(f"    {line}" for line in lines[1:]))
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
