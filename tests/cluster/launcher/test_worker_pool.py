"""Pools of processes that answer requests together: results, errors and cleanup."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from tests.support.starting import piped
from tfdist import cluster
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.errors import LaunchError


def doubling(offset: int) -> Callable[[int], int]:
    """Returns a worker function that doubles a number and adds an offset."""
    return lambda number: 2 * number + offset


def failing() -> Callable[[], None]:
    raise ValueError("no such engine")


def ranked() -> Callable[[str], object]:
    """Returns a worker function that reports facts about the worker, or fails on request."""
    actions = {
        "place": lambda: (cluster.discover().rank, cluster.discover().size),
        "addresses": lambda: os.environ.get("TF_CONFIG"),
        "variable": lambda: os.environ.get("OF_THE_POOL"),
        "sleep": lambda: time.sleep(600 if cluster.discover().rank else 0),
        "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    }
    return lambda question: actions[question]()


def test_answers_are_ordered_by_rank_and_processes_end() -> None:
    with WorkerPool(doubling, 1, num_workers=2, pauses=True) as pool:
        assert pool.ask(3) == [7, 7]
        assert pool.ask(4) == [9, 9]
        workers = list(pool.processes)
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)


def test_workers_get_their_rank_and_environment() -> None:
    with WorkerPool(ranked, num_workers=3, environ={"OF_THE_POOL": "yes"}) as pool:
        assert pool.ask("place") == [(0, 3), (1, 3), (2, 3)]
        assert pool.ask("variable") == ["yes"] * 3
        with pytest.raises(LaunchError, match="signal SIGKILL"):
            pool.ask("die")


def test_single_process_without_launcher_has_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with WorkerPool(ranked, num_workers=1, via="") as pool:
        assert pool.ask("addresses") == [None]


def test_workers_end_when_the_program_is_killed() -> None:
    script = f"""
import time
from {__name__} import doubling
from tfdist.cluster.launcher.worker_pool import WorkerPool
pool = WorkerPool(doubling, 1, num_workers=2, pauses=True)
pool.start()
print(*(worker.pid for worker in pool.processes), flush=True)
time.sleep(600)
"""
    with piped(sys.executable, "-c", script) as program:
        assert program.stdout is not None
        workers = [psutil.Process(int(word)) for word in program.stdout.readline().split()]
        program.kill()
    assert len(workers) == 2
    _, left = psutil.wait_procs(workers, timeout=30)
    assert not left


def test_start_failure_raises() -> None:
    with pytest.raises(LaunchError, match="no such engine"):
        WorkerPool(failing, num_workers=1).start()


def test_worker_failure_raises_and_the_pool_restarts() -> None:
    with WorkerPool(doubling, 1, num_workers=1) as pool:
        with pytest.raises(LaunchError, match=r"(?s)rank 0 .*Traceback.*unsupported operand"):
            pool.ask(None)
        assert pool.processes == []
        assert pool.ask(1) == [3]


def test_time_out_ends_all_workers() -> None:
    with WorkerPool(ranked, timeout_seconds=0.5) as pool:
        workers = list(pool.processes)
        with pytest.raises(LaunchError, match=r"no response to \('sleep',\) within 0.5 s"):
            pool.ask("sleep")
        assert not any(worker.is_running() for worker in workers)
