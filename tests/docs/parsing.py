"""Parses command lines by their commands' own parsers, and runs nothing: `... <lines.json`.

Reads a list of `[module, [argument, ...]]`, prints a line for each that is refused (the command
said on standard error why), and imports no TensorFlow, like a command with
`--help`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from pipelines.console import command_line
from tfdist import launch
from tfdist.cluster.launcher.options import Options
from tfdist.console import command
from tfdist.console.settings_file import Setting
from tfdist.run import flags

TRAIN = "python -m tfdist.train"
#: Of the training command, what is no field of its configuration.
_ACTIONS = ("config", "print_config", "list_recipes", "new_recipe", "set")


class Parsed(BaseException):
    """The command line is right: nothing else is to happen."""


def _parse(parser: ArgumentParser, arguments: Any, **options: Any) -> Any:
    values = as_it_is(parser, arguments, **options)
    if parser.prog == TRAIN:
        given = {name: value for name, value in values.items() if name not in _ACTIONS}
        flags.resolve([{name: Setting(value, name) for name, value in given.items()}])
    raise Parsed


def _run(parser: ArgumentParser, command: Callable[..., None], arguments: Any = None) -> int:
    parser.parse_args(arguments)
    raise Parsed


def _launch(chosen: Options) -> None:
    if chosen.command[1:3] == ("-m", "tfdist.train"):
        importlib.import_module("tfdist.train").main(list(chosen.command[3:]))
    raise Parsed


as_it_is = command.parse
command.parse, command_line.run, launch.launch = _parse, _run, _launch


def refused(module: str, arguments: list[str]) -> str | None:
    """Returns why a command line is refused; None: it is not."""
    if not hasattr(importlib.import_module(module), "main"):
        module = f"{module}.__main__"
    if "--" in arguments and module == "tfdist.tools.tune.__main__":
        at = arguments.index("--")
        return refused("tfdist.train", arguments[at + 1 :]) or refused(module, arguments[:at])
    try:
        code = importlib.import_module(module).main(arguments)
    except Parsed:
        return None
    except SystemExit as end:  # --help
        code = end.code
    return f"{module} {arguments} ends with {code}" if code else None


def main() -> None:
    """Reads, parses, prints."""
    for module, arguments in json.load(sys.stdin):
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            why = refused(module, arguments)
        if why:
            print(why.replace("\n", " "))
    loaded = {"tensorflow", "keras"} & set(sys.modules)
    if loaded:
        print(f"parsing imported {loaded}")


if __name__ == "__main__":
    main()
