"""Parameter servers as processes: a chief, two workers and a server, some of which are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes.parameter_server import BATCH_SIZE, BATCHES
from tests.support import ROOT
from tfdist.cluster.networks import free_ports

SECONDS = 240.0


class Cluster:
    """The processes, and the reports of the chief."""

    def __init__(self, folder: Path) -> None:
        addresses = iter(f"127.0.0.1:{port}" for port in free_ports(4))
        counts = {"chief": 1, "worker": 2, "ps": 1}
        self._tasks = {task: [next(addresses) for _ in range(n)] for task, n in counts.items()}
        self._stop = folder / "stop"
        self._deadline = time.monotonic() + SECONDS
        self._started: list[subprocess.Popen] = []
        self.processes = {
            (task, index): self.start(task, index)
            for task, n in counts.items()
            for index in range(n)
        }
        self.reports: list[dict[str, Any]] = []
        self.errors = ""
        chief = self.processes["chief", 0]
        self._readers = [
            threading.Thread(target=self._read_reports, args=[chief]),
            threading.Thread(target=self._read_errors, args=[chief]),
        ]
        for reader in self._readers:
            reader.start()

    def start(self, task: str, index: int) -> subprocess.Popen:
        config = {"cluster": self._tasks, "task": {"type": task, "index": index}}
        variables = {"TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "3"}
        pipe = subprocess.PIPE if task == "chief" else subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.parameter_server", str(self._stop)],
            cwd=ROOT, env=os.environ | variables, stdout=pipe, stderr=pipe, text=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def _read_reports(self, chief: subprocess.Popen) -> None:
        for line in chief.stdout or ():
            self.reports.append(json.loads(line))

    def _read_errors(self, chief: subprocess.Popen) -> None:
        for line in chief.stderr or ():
            self.errors += line

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        while not condition():
            assert time.monotonic() < self._deadline, f"timed out waiting for {what}: {self.errors}"
            time.sleep(0.05)

    def wait_for_epochs(self, more: int) -> None:
        """Waits until the chief has trained more epochs."""
        wanted = len(self.reports) + more
        self.wait(lambda: len(self.reports) >= wanted or self.ended("chief", 0), f"epoch {wanted}")
        assert not self.ended("chief", 0), self.errors

    def ended(self, task: str, index: int) -> bool:
        return self.processes[task, index].poll() is not None

    def kill(self, task: str, index: int) -> None:
        self.processes[task, index].kill()
        self.processes[task, index].wait()

    def finish(self) -> dict[tuple[str, int], int | None]:
        """Tells the chief to stop, and returns the exit codes of the processes."""
        self._stop.touch()
        self.wait(lambda: all(self.ended(*task) for task in self.processes), "the end")
        for reader in self._readers:
            reader.join()
        return {task: process.returncode for task, process in self.processes.items()}

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    processes = Cluster(tmp_path)
    yield processes
    processes.close()


def test_killed_worker_is_replaced_without_losing_steps(cluster: Cluster) -> None:
    cluster.wait_for_epochs(2)
    assert cluster.reports[1]["steps"] == 2 * BATCHES
    cluster.kill("worker", 0)
    cluster.wait_for_epochs(3)
    overlapping = cluster.reports[-1]["overlapping"]  # the other worker runs all steps
    cluster.processes["worker", 0] = cluster.start("worker", 0)
    cluster.wait(lambda: cluster.reports[-1]["overlapping"] > overlapping, "a second worker")
    assert set(cluster.finish().values()) == {0}
    *epochs, summary = cluster.reports
    # The killed worker lost at most one batch.
    assert 0 <= len(epochs) * BATCHES - epochs[-1]["steps"] <= 1
    assert epochs[-1]["rows"] == BATCHES * BATCH_SIZE
    assert "updates on average" in summary["staleness"]


@pytest.mark.long  # tests/strategies/parameter_server covers the error of a lost server
def test_killed_server_ends_the_run(cluster: Cluster) -> None:
    cluster.wait_for_epochs(1)
    cluster.kill("ps", 0)
    cluster.wait(lambda: cluster.ended("chief", 0), "the chief's error")
    codes = cluster.finish()
    assert codes["chief", 0] == 1
    assert "error: A parameter server and its variables are gone" in cluster.errors
    assert "Traceback" not in cluster.errors
    assert codes["worker", 0] == codes["worker", 1] == 0
