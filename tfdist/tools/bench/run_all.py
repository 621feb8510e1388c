"""`tfdist bench all`: runs every benchmark. Imports no TensorFlow."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from tfdist.console import command, tables
from tfdist.errors import ConfigurationError, LaunchError

DESCRIPTION = "runs all benchmarks sequentially, each in a new process"

#: Commands that are not run: `compare` needs another commit.
_NOT_RUN = ("all", "compare")
#: Extensions of the files that a benchmark writes, by its flag.
_FILES = {"--json": "json", "--table": "md", "--chart": "png"}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--only", nargs="+", metavar="NAME", help="benchmarks to run")
    parser.add_argument("--folder", default="bench", metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--smoke", action="store_true", help="use tiny sizes, to check that all benchmarks run"
    )


def run(only: Sequence[str] | None, folder: str, smoke: bool) -> None:
    """Runs the benchmarks and prints a summary; the arguments are the values of the flags.

    Raises:
        ConfigurationError: There is no benchmark with this name.
        LaunchError: A benchmark failed. The other benchmarks ran.
    """
    from tfdist.tools.bench.__main__ import COMMANDS

    run_each("tfdist.tools.bench", COMMANDS, only, folder, smoke)


def run_each(
    program: str, commands: Mapping[str, str], only: Sequence[str] | None, folder: str, smoke: bool
) -> None:
    """Runs the subcommands of a program.

    Raises:
        ConfigurationError: There is no subcommand with this name.
        LaunchError: A subcommand failed. The other subcommands ran.
    """
    names = [name for name in commands if name not in _NOT_RUN]
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        raise ConfigurationError(
            f"--only {' '.join(unknown)}: expected one or more of {', '.join(names)}."
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    flags = ["--smoke"] if smoke else []
    rows = []
    for name in only or names:
        began = time.monotonic()
        # Files for results, for the flags that the benchmark has.
        parser = command.parser(name, "")
        importlib.import_module(commands[name]).add_arguments(parser)
        help_text = parser.format_help()
        files = []
        for flag, extension in _FILES.items():
            if flag in help_text:
                files += [flag, str(Path(folder) / f"{name}.{extension}")]
        line = [sys.executable, "-m", program, name, *files, *flags]
        code = subprocess.run(line, check=False).returncode
        outcome = f"exit code {code}" if code else "completed"
        rows.append((name, f"{time.monotonic() - began:.0f}", outcome))
    tables.numbers(("benchmark", "seconds", ""), rows, title=f"results are in {folder}")
    failed = [name for name, _, outcome in rows if outcome != "completed"]
    if failed:
        raise LaunchError(f"{', '.join(failed)} failed. See the output above.")
