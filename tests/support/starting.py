"""Runs the launch command as a user does, with plain Python programs as workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

SECONDS = 240
ENVIRON = os.environ | {"PYTHONPATH": str(ROOT)}

#: First lines of a worker's program.
HEAD = """
from tests.support import ROOT
import json, os, pathlib, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
rank = task["index"]
"""


def program(folder: Path, body: str) -> str:
    """Writes a worker's program, and returns its path."""
    path = folder / "worker.py"
    path.write_text(HEAD + body)
    return str(path)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tfdist.launch", *arguments]


def launch(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def launch_program(folder: Path, body: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return launch(*flags, "--", sys.executable, program(folder, body))
