"""The flags of `python -m tfdist.bench all`, and what it does. Imports no TensorFlow."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from tfdist.console import command, tables
from tfdist.errors import ConfigurationError, LaunchError

DESCRIPTION = "every benchmark, one after the other, each in a process of its own"

#: The endings of what a benchmark writes, by the flag that names the file.
_FILES = {"--json": "json", "--table": "md", "--chart": "png"}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these; left out: all")
    parser.add_argument("--folder", default="bench", metavar="DIR", help="where to write results")
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that all work")


def run(only: Sequence[str] | None, folder: str, smoke: bool) -> None:
    """Runs them and prints what became of each; the arguments are the flags.

    Raises:
        ConfigurationError: There is no such benchmark.
        LaunchError: One failed; the others were run.
    """
    from tfdist.bench.__main__ import COMMANDS

    names = [name for name in COMMANDS if name != "all"]
    wrong = sorted(set(only or ()) - set(names))
    if wrong:
        raise ConfigurationError(f"--only {' '.join(wrong)}: expected some of {', '.join(names)}.")
    Path(folder).mkdir(parents=True, exist_ok=True)
    rows = [
        _run(name, COMMANDS[name], folder, ["--smoke"] if smoke else []) for name in only or names
    ]
    tables.numbers(("benchmark", "seconds", ""), rows, title=f"written to {folder}")
    failed = [name for name, _, outcome in rows if outcome]
    if failed:
        raise LaunchError(f"{', '.join(failed)} failed: what each said stands above.")


def _run(name: str, module: str, folder: str, more: Sequence[str]) -> tuple[str, str, str]:
    """Runs one, and returns its line of the table."""
    parser = command.parser(name, "")
    importlib.import_module(module).add_arguments(parser)
    known = parser.format_help()
    files = [
        word
        for flag, ending in _FILES.items()
        if flag in known
        for word in (flag, str(Path(folder) / f"{name}.{ending}"))
    ]
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "tfdist.bench", name, *files, *more], check=False)
    outcome = f"exit code {done.returncode}" if done.returncode else ""
    return name, f"{time.monotonic() - began:.0f}", outcome
