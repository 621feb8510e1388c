"""Workers that nobody else ends: what becomes of the others when something happens to one."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes.reporting import SECONDS as LIMIT
from tests.processes.reporting import SIZE
from tests.support import ROOT
from tests.support.waiting import wait_for
from tfdist.watchdog.exit import EXIT_CODE

SECONDS = 90.0

#: Takes a fault and the rank that it befalls, and for how many seconds all are stopped; returns
#: code and output of the others.
Run = Callable[..., list[tuple[int, str]]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ExitStack() as cleaning:

        def all_but_one(fault: str, victim: int, pause: float = 0.0) -> list[tuple[int, str]]:
            processes = []
            for rank in range(SIZE):
                arguments = [str(tmp_path), str(rank), fault, str(victim)]
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.processes.reporting", *arguments],
                    cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )  # fmt: skip
                cleaning.enter_context(process)
                cleaning.callback(process.kill)
                processes.append(process)
            if pause:
                wait_for(lambda: len(list(tmp_path.glob("heard-*"))) == SIZE, SECONDS)
                _signal(processes, signal.SIGSTOP)
                time.sleep(pause)
                _signal(processes, signal.SIGCONT)
            others = [process for rank, process in enumerate(processes) if rank != victim]
            deadline = time.monotonic() + SECONDS
            outputs = [p.communicate(timeout=deadline - time.monotonic())[0] for p in others]
            return [(p.returncode, text) for p, text in zip(others, outputs, strict=True)]

        yield all_but_one


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("killed", "died: its connection closed without a word. "),
        ("stopped", "has given no sign of life for "),
        ("asleep", "is alive, but has held up the others for 4 s. "),
        ("failing", "failed: ValueError: cursed"),
    ],
)
def test_the_others_say_why_and_end(fault: str, message: str, victim: int, run: Run) -> None:
    for code, output in run(fault, victim):
        assert re.search(rf"^error: rank {victim} on \S+ \(pid \d+\) {message}", output), output
        if fault != "failing":
            assert "It reached step 7, not step 7 and its callbacks." in output
        for rank in range(SIZE):
            assert re.search(rf"^  rank {rank} on \S+ \(pid .*; last sign of li", output, re.M)
        assert "reporting.py" in output  # the stack of the main thread
        assert code == EXIT_CODE


def test_who_ended_in_order_ends_nobody(run: Run) -> None:
    assert run("leaving", 1) == [(0, ""), (0, "")]


def test_a_pause_of_all_ends_nobody(run: Run) -> None:
    """As of a job that is suspended: when they go on none has been silent."""
    assert run("leaving", 1, pause=2 * LIMIT) == [(0, ""), (0, "")]


def _signal(processes: Sequence[subprocess.Popen[str]], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)
