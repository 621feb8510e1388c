"""The example trains over two processes, started as its docstring says."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import keras
import pytest

from tests.examples import images
from tests.support import ROOT
from tests.support.commands import needs_horovod
from tests.support.starting import ENVIRON, run

pytestmark = pytest.mark.processes


def program(name: str) -> str:
    """Returns the path of a program next to the interpreter, or on the search path."""
    return shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name) or name


AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []
MPIRUN = [program("mpirun"), "--oversubscribe", *AS_ROOT, "-np", "2"]
HOROVODRUN = [program("horovodrun"), "--gloo", "-np", "2"]


def output_of(*command: str, cwd: Path = ROOT) -> str:
    done = run(*command, cwd=cwd, env=ENVIRON | {"TF_CPP_MIN_LOG_LEVEL": "3"})
    return done.stdout + done.stderr


@needs_horovod
@pytest.mark.parametrize(
    "launcher",
    # horovodrun starts workers in tests/cluster/launcher and tests/processes
    [MPIRUN, pytest.param(HOROVODRUN, marks=pytest.mark.long)],
    ids=["mpirun", "horovodrun"],
)
def test_horovod_trains_over_two_processes(launcher: list[str], tmp_path: Path) -> None:
    """Both ranks print one accuracy, and plain Keras loads the trained model."""
    path = tmp_path / "m.keras"
    output = output_of(*launcher, sys.executable, "tests/examples/horovod_mnist.py", str(path))
    printed = re.findall(r"rank (\d) of 2: accuracy ([\d.]+)", output)
    assert sorted(rank for rank, _ in printed) == ["0", "1"], output
    assert printed[0][1] == printed[1][1], "the ranks' metrics differ"
    assert float(printed[0][1]) > 0.5
    assert keras.models.load_model(path).evaluate(*images.load(), verbose=0)[1] > 0.7
