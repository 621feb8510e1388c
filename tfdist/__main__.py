"""`python -m tfdist`, or `tfdist`: all commands under one name. Imports no TensorFlow."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

import tfdist
from tfdist.console import command
from tfdist.errors import ConfigurationError

#: What each does, and the module whose `main(arguments)` it is.
COMMANDS = {
    "train": ("tfdist.train", "trains a recipe under a strategy"),
    "launch": ("tfdist.launch", "starts the workers of a run"),
    "init": ("tfdist.init", "asks six questions and writes a configuration"),
    "verify": ("tfdist.verify.__main__", "compares a strategy with one device, on this machine"),
    "doctor": ("tfdist.doctor.__main__", "looks this machine over before a run"),
    "plan": ("tfdist.plan.__main__", "says what a training will take before it is started"),
    "tune": ("tfdist.tune.__main__", "finds good values of flags by trying"),
    "runs": ("tfdist.runs.__main__", "lists, compares and deletes runs"),
    "bench": ("tfdist.bench.__main__", "measures step, input, all-reduce and scaling"),
    "install_horovod": ("tfdist.install_horovod.__main__", "builds Horovod for this Python"),
}

#: Set by argcomplete's shell function: a word is to be finished, nothing is to run.
_COMPLETES = "_ARGCOMPLETE"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first word names, and returns its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if _COMPLETES in os.environ:
        given = _to_complete()
    return command.run(lambda: _run(given))


def _run(given: Sequence[str]) -> int:
    name, *rest = given or ["--help"]
    if name in ("--help", "-h"):
        print(_help())
        return 0
    if name == "--version":
        print(f"tfdist {tfdist.__version__}")
        return 0
    if name not in COMMANDS:
        raise ConfigurationError(f"{name!r} is no command: expected one of {', '.join(COMMANDS)}.")
    code: int = importlib.import_module(COMMANDS[name][0]).main(rest)
    return code


def _help() -> str:
    lines = [f"  {name:16} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tfdist COMMAND ...   (or python -m tfdist COMMAND ...)\n",
            *lines,
            "\ntfdist COMMAND --help lists its flags; --version shows that of tfdist.",
            "Data are packed by python -m pipelines.pack.",
        ]
    )


def _to_complete() -> list[str]:
    """Has argcomplete finish the word at the cursor: a command's flag, or its name.

    What is returned begins no command: where argcomplete, which the shell has, is not installed
    here, nothing runs.
    """
    if importlib.util.find_spec("argcomplete") is None:
        raise SystemExit(1)
    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
    if len(words) > 2 and words[1] in COMMANDS:
        os.environ[_COMPLETES] = "2"  # words before which the line begins
        return [words[1]]
    parser = command.parser("tfdist", "")
    parser.add_argument("command", choices=list(COMMANDS))
    command.parse(parser, [])
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
