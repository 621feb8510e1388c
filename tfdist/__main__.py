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

#: The module of each command, which has a function `main(arguments)`, and its description.
COMMANDS = {
    "train": ("tfdist.train", "trains a recipe under a strategy"),
    "script": ("tfdist.script.__main__", "runs an unchanged Keras script on all devices"),
    "launch": ("tfdist.launch", "starts the workers of a run"),
    "init": ("tfdist.tools.init", "asks six questions and writes a configuration file"),
    "verify": (
        "tfdist.tools.verify.__main__",
        "checks that a strategy matches one device, on this machine",
    ),
    "doctor": ("tfdist.tools.doctor.__main__", "checks the environment before a run"),
    "plan": ("tfdist.tools.plan.__main__", "predicts the memory and the scaling of a run"),
    "tune": (
        "tfdist.tools.tune.__main__",
        "finds the batch size, the learning rate or other flags by trials",
    ),
    "replay": (
        "tfdist.tools.replay.__main__",
        "repeats a step of a run and shows its gradients and records",
    ),
    "runs": ("tfdist.tools.runs.__main__", "lists, compares and deletes runs"),
    "bench": ("tfdist.tools.bench.__main__", "measures step, input, all-reduce and scaling"),
    "remote": ("tfdist.cluster.remote.__main__", "serves the devices of this host to another one"),
    "install_horovod": (
        "tfdist.tools.install_horovod.__main__",
        "builds Horovod for this Python environment",
    ),
}

#: Set by argcomplete's shell function, which requests completions instead of running a command.
_COMPLETES = "_ARGCOMPLETE"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command in the first argument, and returns its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if _COMPLETES in os.environ:
        given = _complete()
    return command.run(lambda: _run(given))


def _run(given: Sequence[str]) -> int:
    name, *rest = given or ["--help"]
    if name in ("--help", "-h"):
        lines = [f"  {name:16} {what}" for name, (_, what) in COMMANDS.items()]
        print(
            "\n".join(
                [
                    "usage: tfdist COMMAND ...   (or python -m tfdist COMMAND ...)\n",
                    *lines,
                    "\nRun tfdist COMMAND --help for the flags of a command, and tfdist --version "
                    "for the version.",
                    "To pack data, use python -m pipelines.pack.",
                ]
            )
        )
        return 0
    if name == "--version":
        print(f"tfdist {tfdist.__version__}")
        return 0
    if name not in COMMANDS:
        raise ConfigurationError(
            f"{name!r} is not a command: expected one of {', '.join(COMMANDS)}."
        )
    code: int = importlib.import_module(COMMANDS[name][0]).main(rest)
    return code


def _complete() -> list[str]:
    """Completes the word at the cursor with argcomplete: a command or one of its flags.

    Returns:
        The command whose parser completes its flags.
    """
    if importlib.util.find_spec("argcomplete") is None:
        raise SystemExit(1)
    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
    if len(words) > 2 and words[1] in COMMANDS:
        os.environ[_COMPLETES] = "2"  # argcomplete skips the first word
        return [words[1]]
    parser = command.parser("tfdist", "")
    parser.add_argument("command", choices=list(COMMANDS))
    command.parse(parser, [])
    raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
