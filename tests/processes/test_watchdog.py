"""A fault in one worker without a launcher, and how the watchdog ends the others."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.processes.reporting import SECONDS as LIMIT
from tests.processes.reporting import SIZE
from tests.support.commands import wait_for
from tests.support.starting import SECONDS, piped
from tfdist.errors import PEER_LOST

#: By fault: the message that the other workers print.
FAULTS = {
    "killed": "died: its connection closed unexpectedly. ",
    "stopped": "has not responded for ",
    "asleep": "is alive, but has kept the others waiting for 4 s. ",
    "failing": "failed: ValueError: cursed",
}

#: Exit code and output of each process.
Ends = list[tuple[int, str]]


@contextmanager
def group(folder: Path, fault: str, victim: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts processes, one of which has a fault; kills those that remain at the end."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.processes.reporting", str(folder)]
    with ExitStack() as cleaning:
        yield [
            cleaning.enter_context(
                piped(*command, str(rank), fault, str(victim), stderr=subprocess.STDOUT)
            )
            for rank in range(SIZE)
        ]


def ends_of_others(processes: Sequence[subprocess.Popen[str]], victim: int) -> Ends:
    others = [process for rank, process in enumerate(processes) if rank != victim]
    deadline = time.monotonic() + SECONDS
    outputs = [p.communicate(timeout=deadline - time.monotonic())[0] for p in others]
    return [(p.returncode, text) for p, text in zip(others, outputs, strict=True)]


@pytest.fixture(scope="module", params=[0, 1])
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, Ends]]:
    """The victim, and how the others end by fault. All groups run at once: they mostly wait."""
    victim, folder = request.param, tmp_path_factory.mktemp("groups")
    with ExitStack() as stack:
        running = {
            fault: stack.enter_context(group(folder / fault, fault, victim)) for fault in FAULTS
        }
        return victim, {
            name: ends_of_others(processes, victim) for name, processes in running.items()
        }


@pytest.mark.xdist_group("watchdog")
@pytest.mark.parametrize("fault", FAULTS)
def test_other_workers_report_the_fault_and_exit(
    fault: str, ends: tuple[int, dict[str, Ends]]
) -> None:
    victim, by_fault = ends
    others = [rank for rank in range(SIZE) if rank != victim]
    for rank_of_output, (code, output) in zip(others, by_fault[fault], strict=True):
        begin = rf"^error: rank {victim} on \S+ \(pid \d+\) {FAULTS[fault]}"
        assert re.search(begin, output), output
        if fault != "failing":
            assert "It reached step 7, not step 7 and its callbacks." in output
        # Only rank 0 receives all reports. Without it, a worker knows of rank 0 and itself.
        for rank in range(SIZE) if victim else (0, rank_of_output):
            assert re.search(rf"^  rank {rank} on \S+ \(pid .*; last report", output, re.M)
        assert "reporting.py" in output  # the main thread's stack
        assert code == PEER_LOST


def test_orderly_exit_of_a_worker_ends_no_other(tmp_path: Path) -> None:
    with group(tmp_path / "group", "leaving", 1) as processes:
        assert ends_of_others(processes, 1) == [(0, ""), (0, "")]


def test_suspending_all_workers_ends_none(tmp_path: Path) -> None:
    """As when a job is suspended: after it continues, no worker counts as silent."""
    folder = tmp_path / "group"
    with group(folder, "leaving", 1) as processes:
        wait_for(lambda: len(list(folder.glob("heard-*"))) == SIZE, SECONDS)
        _signal(processes, signal.SIGSTOP)
        time.sleep(2 * LIMIT)
        _signal(processes, signal.SIGCONT)
        assert ends_of_others(processes, 1) == [(0, ""), (0, "")]


def _signal(processes: Sequence[subprocess.Popen[str]], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)
