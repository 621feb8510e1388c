"""Runs commands in subprocesses: the launch command with Python programs as workers, and others."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    timeout: float = SECONDS,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a command with its output captured, and asserts its exit code unless `code` is None."""
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, **options
    )
    assert code is None or done.returncode == code, done.stdout[-4000:] + done.stderr[-8000:]
    return done


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments, as `run` does."""
    return run(sys.executable, *arguments, **options)


def write_slow_recipe(path: Path, seconds: float) -> None:
    """Writes the template's recipe, with a pause after each step on every worker."""
    path.write_text(
        f"""
import time, keras
from recipes._template import *

class Pause(keras.callbacks.Callback):
    chief_only, only_reads = False, True
    def on_train_batch_end(self, batch, logs=None):
        time.sleep({seconds})

def callbacks(config):
    return [Pause()]
"""
    )


def program(folder: Path, body: str) -> str:
    """Writes a worker's program, and returns its path."""
    path = folder / "worker.py"
    path.write_text(HEAD + body)
    return str(path)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tfdist.launch", *arguments]


def tf_config(addresses: Sequence[str], rank: int) -> dict[str, str]:
    """Returns the environment variable that describes a cluster of workers to one of them."""
    task = {"type": "worker", "index": rank}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": [*addresses]}, "task": task})}


@contextlib.contextmanager
def piped(
    *command: str, env: Mapping[str, str] = ENVIRON, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Starts a command with its output piped, and kills it at the end of the block."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **(pipes | options)) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_line(process: subprocess.Popen[str], begin: str) -> str:
    """Returns the first line of a process's output that begins with a text."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begin):
            return line
    raise AssertionError(f"the process printed no line that begins with {begin!r}")


def start(*arguments: str, **options: Any) -> Any:
    """Starts the launch command with its output piped."""
    return piped(*command(*arguments), **options)


def launch(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run(*command(*arguments), cwd=cwd, code=None)


def launch_program(folder: Path, body: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return launch(*flags, "--", sys.executable, program(folder, body))
