"""What commands print for `--help`, which has to come at once: without TensorFlow."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT

#: All in one process: what the first imports, the others find imported.
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
    """Returns every package within one that `python -m` runs, by its dotted name."""
    found = sorted((ROOT / package).glob("*/__main__.py"))
    return [f"{package}.{path.parent.name}" for path in found]


def help_without_tensorflow(*commands: str) -> str:
    """Returns what the commands print for `--help`; fails where one imports TensorFlow."""
    return _without_tensorflow("--help", *commands)


def without_tensorflow(command: str, flag: str) -> str:
    """Returns what a command prints for a flag; fails where it imports TensorFlow."""
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
