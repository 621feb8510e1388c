"""Runs commands with `--help`, which must not import TensorFlow, and waits for processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.support import ROOT
from tfdist.cluster.launcher import plan

#: One process runs all commands; modules that one imports are loaded for the next.
_RUN = """
import runpy, sys
flag, *commands = sys.argv[1:]
for command in commands:
    sys.argv[1:] = [flag]
    try:
        runpy.run_module(command, run_name="__main__")
    except SystemExit as end:
        assert not end.code
    assert not {"tensorflow", "keras"} & set(sys.modules), command
"""


def packages_that_run(package: str) -> list[str]:
    """Returns the dotted names of all modules and subpackages with a command line of their own."""
    folders = [path.parent.name for path in (ROOT / package).glob("*/__main__.py")]
    files = (path for path in (ROOT / package).glob("*.py") if path.stem != "__main__")
    modules = [f.stem for f in files if 'if __name__ == "__main__":' in f.read_text()]
    return [f"{package}.{name}" for name in sorted(folders + modules)]


def help_without_tensorflow(*commands: str) -> str:
    """Returns what the commands print for `--help`; fails if one imports TensorFlow."""
    return _without_tensorflow("--help", *commands)


def without_tensorflow(command: str, flag: str) -> str:
    """Returns what a command prints for a flag; fails if it imports TensorFlow."""
    return _without_tensorflow(flag, command)


def _without_tensorflow(flag: str, *commands: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _RUN, flag, *commands],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    """Waits until a condition holds, and fails on a time-out."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"timed out after {seconds:.0f} s"
        time.sleep(0.05)


# ---- packages ----


_NO_HOROVOD = "Horovod is not installed: make horovod"

needs_horovod = pytest.mark.skipif(not plan.horovod_installed(), reason=_NO_HOROVOD)
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin"
)


def require_horovod() -> None:
    """Skips the running test without Horovod."""
    if not plan.horovod_installed():
        pytest.skip(_NO_HOROVOD)


def require_obstore() -> None:
    """Skips the running test, or the tests of a file, without the client of object stores."""
    pytest.importorskip("obstore", reason="needs the extra 'cloud'")
