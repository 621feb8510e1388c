"""Runs commands in subprocesses: the launch command with Python programs as workers, and others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import ROOT

SECONDS = 300
ENVIRON = os.environ | {"PYTHONPATH": str(ROOT)}

#: First lines of a worker's program.
HEAD = """
from tests.support import ROOT
import json, os, pathlib, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
rank = task["index"]
"""


def run(
    *command: str,
    cwd: Path | None = None,
    env: Mapping[str, str] = ENVIRON,
    code: int | None = 0,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a command with its output captured, and asserts its exit code unless `code` is None."""
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS, **options
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


def program(folder: Path, body: str) -> str:
    """Writes a worker's program, and returns its path."""
    path = folder / "worker.py"
    path.write_text(HEAD + body)
    return str(path)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tfdist.launch", *arguments]


def start(*arguments: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Starts the launch command with its output piped."""
    return subprocess.Popen(
        command(*arguments), cwd=cwd, env=ENVIRON,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def launch(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run(*command(*arguments), cwd=cwd, code=None)


def launch_program(folder: Path, body: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return launch(*flags, "--", sys.executable, program(folder, body))
