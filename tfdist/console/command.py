"""The manner of every command: flags, one-line errors, exit codes. Imports no TensorFlow."""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from tfdist.console import own_packages
from tfdist.errors import REQUEUE, ConfigurationError, Preempted, TfdistError, did_you_mean

#: Shells show 128 + the signal's number; an interrupt is signal 2.
INTERRUPTED = 130


def run(main: Callable[[], int | None]) -> int:
    """Calls `main`, which may import TensorFlow, and returns the exit code of the process.

    Args:
        main: Does the work; returns the exit code, None for 0; raises what the user should know.

    Returns:
        `main`'s exit code; 1 for an expected error, which is printed as one line; 130 for an
        interrupt; 138, `tfdist.errors.REQUEUE`, after a preemption: the same command resumes.
    """
    try:
        own_packages.put_first()
        from pipelines.quiet import quieten_tensorflow

        quieten_tensorflow()
        return main() or 0
    except TfdistError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Preempted:
        return REQUEUE
    except KeyboardInterrupt:
        return INTERRUPTED


def parser(program: str, description: str) -> ArgumentParser:
    """Returns an empty parser, for `parse`; arguments are added as to argparse.

    Args:
        program: How the command is called, for its usage line.
        description: What it does.
    """
    return ArgumentParser(
        prog=program,
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
    )


def parse(
    parser: ArgumentParser, arguments: Sequence[str] | None, *, defaults: bool = True
) -> Namespace:
    """Returns the values of a command line; `--help` prints and exits.

    Args:
        parser: Knows the flags.
        arguments: The command line without the program's name, or None for this process's.
        defaults: Whether to return what was not given too, with its default.

    Raises:
        ConfigurationError: An unknown flag, or a value that does not fit.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return parser.parse_args(words, defaults=defaults)
    except argparse.ArgumentError as error:
        message = " ".join(str(error).split()) + _hint(parser, words)
        raise ConfigurationError(f"{message}\n{parser.prog} --help lists what there is.") from None


def run_one_of(
    commands: Mapping[str, str],
    program: str,
    description: str,
    arguments: Sequence[str] | None,
    **further: Any,
) -> None:
    """Parses a command line whose first word is a subcommand, and runs what it names.

    Args:
        commands: Of each subcommand, the module that has its `DESCRIPTION`, adds its flags
            (`add_arguments`) and runs it with their values (`run`).
        program: As of `parser`.
        description: As of `parser`.
        arguments: As of `parse`.
        **further: What `run` is given beside the values of its flags.

    Raises:
        TfdistError: As the subcommand.
    """
    whole = parser(program, description)
    subcommands = whole.add_subcommands(dest="subcommand")
    for name, path in commands.items():
        module = importlib.import_module(path)
        one = parser(f"{program} {name}", module.DESCRIPTION)
        module.add_arguments(one)
        subcommands.add_subcommand(name, one, help=module.DESCRIPTION)
    chosen = parse(whole, arguments)
    name = chosen.subcommand
    importlib.import_module(commands[name]).run(**chosen[name].as_dict(), **further)


def _hint(parser: ArgumentParser, words: Sequence[str]) -> str:
    """The flag that a misspelt one may have been."""
    known = re.findall(r"--[\w-]+", parser.format_help())
    flags = (word.partition("=")[0] for word in itertools.takewhile("--".__ne__, words))
    unknown = [flag for flag in flags if flag.startswith("--") and flag not in known]
    hint = did_you_mean(unknown[0], known) if unknown else ""
    return f".{hint}" if hint else ""
