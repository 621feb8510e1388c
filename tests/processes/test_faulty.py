"""A fault in one of two training processes without a launcher, and its effect on the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.processes import prebuilt_model
from tests.processes.faulty import ASLEEP
from tests.support import ROOT, starting
from tfdist.cluster.networks import free_ports
from tfdist.errors import PEER_LOST

SECONDS = 240.0

#: Takes the fault of rank 1, and returns the exit code and output of each rank.
Train = Callable[[str], list[tuple[int, str]]]


@pytest.fixture
def train() -> Iterator[Train]:
    with ExitStack() as cleaning:

        def both(fault: str) -> list[tuple[int, str]]:
            addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
            command = [sys.executable, "-m", "tests.processes.faulty", "multi_worker", fault, "1"]
            processes = []
            for rank in range(2):
                environ = starting.ENVIRON | starting.tf_config(addresses, rank)
                process = starting.piped(*command, env=environ, stderr=subprocess.STDOUT)
                processes.append(cleaning.enter_context(process))
            if fault == ASLEEP:
                processes[0].wait(SECONDS)
                processes[1].kill()
            outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
            return [(p.returncode, text) for p, text in zip(processes, outputs, strict=True)]

        yield both


@pytest.mark.long  # test_watchdog.py kills workers, and test_cut_wire.py loses them in training
def test_killed_worker_is_reported(train: Train) -> None:
    code, output = train("killed")[0]
    assert "error: rank 1 on" in output
    assert "died: its connection closed unexpectedly." in output
    assert "faulty.py" in output  # the main thread's stack, down to the user's code
    assert code == PEER_LOST


@pytest.mark.long  # test_watchdog.py covers the report of a sleeping worker
def test_worker_that_never_reaches_the_first_step_is_reported(train: Train) -> None:
    code, output = train(ASLEEP)[0]
    assert "is alive, but has kept the others waiting for 6 s. It reached nothing, not " in output
    assert code == PEER_LOST


def test_error_of_a_worker_is_reported(train: Train) -> None:
    (code, output), (code_of_1, output_of_1) = train("failing")
    assert "failed: ValueError: this batch is cursed\n" in output
    assert code == PEER_LOST
    assert "ValueError: this batch is cursed\nand more about it" in output_of_1
    assert code_of_1 == 1


def test_interrupt_of_one_worker_stops_all_after_the_same_step(train: Train) -> None:
    for code, output in train("interrupted"):
        assert "left with 2 epochs" in output
        assert "\nerror:" not in output  # of the command; TensorFlow logs missing drivers as errors
        assert code == 130


# ---- a model that was built before ----


def losses(output: str) -> list[str]:
    return [line.partition("losses ")[2] for line in output.splitlines() if "losses" in line]


@pytest.mark.processes
def test_models_that_were_built_first_train_over_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prebuilt_model.main("plain")
    plain = losses(capsys.readouterr().out)
    assert len(plain) == 2
    script = [sys.executable, "-m", "tests.processes.prebuilt_model", "multi_worker"]
    assert losses(starting.launch("--num-workers", "2", "--", *script, cwd=ROOT).stdout) == plain
