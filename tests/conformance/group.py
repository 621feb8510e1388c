"""Groups of processes that train cases together: one is started once and answers many cases."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing.connection
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.conformance.results import Result
from tests.support import ROOT
from tfdist.errors import TfdistError

START_SECONDS, CASE_SECONDS = 240.0, 120.0

#: Horovod looks for work so many ms apart. At its own 1 ms three idle processes take more than half
#: a core from those that trace.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_CYCLE_TIME": "10"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which processes a group has.

    Attributes:
        strategy: tfdist's name of it.
        num_workers: processes.
        num_devices: logical CPU devices of each; workers of a parameter server's in-line cluster.
        via: what starts and joins the processes: "TF_CONFIG", "mpi", "gloo"; or "nothing".
    """

    strategy: str
    num_workers: int
    num_devices: int = 1
    via: str = "TF_CONFIG"

    def __str__(self) -> str:
        devices = f"x{self.num_devices}" if self.num_devices > 1 else ""
        return f"{self.strategy}-{self.via}-{self.num_workers}{devices}"


#: Those that train every case: by strategy.
LAYOUTS = {
    "horovod": [Layout("horovod", 2, via="mpi"), Layout("horovod", 3, via="gloo")],
    "multi_worker": [
        Layout("multi_worker", 2),
        Layout("multi_worker", 3),
        Layout("multi_worker", 2, num_devices=2),
    ],
    "parameter_server": [Layout("parameter_server", 1, via="nothing")],
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one worker made of a case: its result, or what it raised.

    Attributes:
        result: None where it raised something.
        error: the traceback of that.
        declined: the message of it, where it was a TfdistError.
    """

    result: Result | None
    error: str = ""
    declined: str = ""


class Group:
    """Processes of one layout; use as a context.

    Args:
        layout: of the processes.
        worker: the module that each runs.
    """

    def __init__(self, layout: Layout, worker: str = "tests.conformance.worker") -> None:
        self.layout, self._worker = layout, worker
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def train(self, case: str) -> Result:
        """Returns what all workers came to.

        Raises:
            TfdistError: All of them decline the case.
            AssertionError: A worker failed, or they differ, be it by a bit.
            TimeoutError: As `ask`.
        """
        answers = self.ask(case)
        if all(answer.declined for answer in answers):
            raise TfdistError(answers[0].declined)
        if failed := [answer.error for answer in answers if answer.error]:
            raise AssertionError("\n".join(failed))
        first, *others = [dataclasses.asdict(answer.result) for answer in answers]
        for rank, other in enumerate(others, 1):
            np.testing.assert_equal(other, first, f"rank {rank} against rank 0")
        return answers[0].result

    def ask(self, case: str) -> list[Answer]:
        """Returns every worker's answer, by rank.

        Raises:
            TimeoutError: The workers did not answer in time; they are started anew for the next.
        """
        if not self._connections:
            self._start()
        try:
            for connection in self._connections:
                connection.send(case)
            return [self._receive(connection, CASE_SECONDS) for connection in self._connections]
        except (OSError, EOFError):
            self.stop()
            raise TimeoutError(
                f"{self.layout} gave no answer to {case} in {CASE_SECONDS:.0f} s: {self._log()}"
            ) from None

    def _receive(self, connection: Connection, seconds: float) -> Any:
        if not connection.poll(seconds):
            raise TimeoutError
        return connection.recv()

    def _start(self) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  # read when something failed
        with Listener(("127.0.0.1", 0)) as listener:
            worker = [sys.executable, "-m", self._worker, str(listener.address[1])]
            worker += [self.layout.strategy, str(self.layout.num_devices)]
            for command, variables in _commands(self.layout, worker):
                environ = os.environ | QUIET | variables
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL,
                    stdout=self._output, stderr=self._output,
                )  # fmt: skip
                self._processes.append(process)
            try:
                by_rank = dict(self._accept(listener) for _ in range(self.layout.num_workers))
            except TimeoutError:
                self.stop()
                raise TimeoutError(f"{self.layout} did not start: {self._log()}") from None
        self._connections = [by_rank[rank] for rank in range(self.layout.num_workers)]

    def _accept(self, listener: Listener) -> tuple[int, Connection]:
        """Waits for the next worker; returns its rank and the way to it."""
        deadline = time.monotonic() + START_SECONDS
        while not multiprocessing.connection.wait([listener._listener._socket], 0.5):
            if time.monotonic() > deadline or any(p.poll() for p in self._processes):
                raise TimeoutError
        connection = listener.accept()
        return self._receive(connection, START_SECONDS), connection

    def _log(self) -> str:
        self._output.seek(0)
        return self._output.read()[-4000:]

    def stop(self) -> None:
        """Ends all processes, and theirs."""
        for process in self._processes:
            family = [psutil.Process(process.pid)] if process.poll() is None else []
            for member in [*(family and family[0].children(recursive=True)), *family]:
                member.kill()
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def _commands(layout: Layout, worker: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """What to run, and with which variables."""
    number = str(layout.num_workers)
    if layout.via == "mpi":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [([_found("mpirun"), "-np", number, "--oversubscribe", *root, *worker], {})]
    if layout.via == "gloo":
        return [([_found("horovodrun"), "--gloo", "-np", number, *worker], {})]
    if layout.via == "nothing":
        return [(worker, {})]
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(layout.num_workers)]
    return [
        (worker, {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses},
                                           "task": {"type": "worker", "index": i}})})
        for i in range(layout.num_workers)
    ]  # fmt: skip


def _found(program: str) -> str:
    """Where a program is: beside the interpreter, which need not be activated, or on the path."""
    own = Path(sys.executable).parent / program
    return str(own) if own.exists() else shutil.which(program) or program


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
