"""The examples train over two processes, started as their docstrings say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import psutil
import pytest

from tests.examples import images
from tests.support import ROOT
from tfdist.cluster.networks import free_ports

SECONDS = 240.0

pytestmark = pytest.mark.processes


def start(command: list[str], cwd: Path = ROOT, **variables: str) -> subprocess.Popen[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"} | variables
    return subprocess.Popen(
        command, cwd=cwd, env=environ, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(processes: list[subprocess.Popen[str]]) -> str:
    """Waits for processes, kills those that remain, and returns their output."""
    try:
        output = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                for member in psutil.Process(process.pid).children(recursive=True):
                    member.kill()
                process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(output)
    return "\n".join(output)


def check(output: str, path: Path) -> None:
    """Asserts that both ranks print one accuracy, and that plain Keras loads a trained model."""
    printed = re.findall(r"rank (\d) of 2: accuracy ([\d.]+)", output)
    assert sorted(rank for rank, _ in printed) == ["0", "1"], output
    assert printed[0][1] == printed[1][1], "the ranks' metrics differ"
    assert float(printed[0][1]) > 0.5
    assert keras.models.load_model(path).evaluate(*images.load(), verbose=0)[1] > 0.7


def program(name: str) -> str:
    """Returns the path of a program next to the interpreter, or on the search path."""
    return shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name) or name


@pytest.fixture
def horovod() -> list[str]:
    """Returns the last arguments of the command that runs Horovod's example."""
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed: make horovod")
    return [sys.executable, "tests/examples/horovod_mnist.py"]


@pytest.mark.long  # tests/processes covers workers with TF_CONFIG
def test_multi_worker_with_tf_config(tmp_path: Path) -> None:
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    command = [sys.executable, "tests/examples/multi_worker.py", str(tmp_path / "m.keras")]
    configs = [
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in (0, 1)
    ]
    output = finish([start(command, TF_CONFIG=json.dumps(config)) for config in configs])
    check(output, tmp_path / "m.keras")


@pytest.mark.long  # tests/examples/test_unchanged_scripts.py starts such a script, too
def test_multi_worker_with_the_launcher(tmp_path: Path) -> None:
    script = [sys.executable, "tests/examples/multi_worker.py", str(tmp_path / "m.keras")]
    launch = [sys.executable, "-m", "tfdist.launch", "--num-workers", "2", "--"]
    check(finish([start(launch + script)]), tmp_path / "m.keras")


def test_horovod_with_mpirun(horovod: list[str], tmp_path: Path) -> None:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = [program("mpirun"), "--oversubscribe", *root, "-np", "2"]
    check(finish([start([*mpirun, *horovod, str(tmp_path / "m.keras")])]), tmp_path / "m.keras")


@pytest.mark.long  # horovodrun starts workers in tests/launcher and tests/processes
def test_horovod_with_horovodrun(horovod: list[str], tmp_path: Path) -> None:
    horovodrun = [program("horovodrun"), "--gloo", "-np", "2"]
    check(finish([start([*horovodrun, *horovod, str(tmp_path / "m.keras")])]), tmp_path / "m.keras")
