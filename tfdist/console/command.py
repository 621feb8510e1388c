"""Command-line conventions: flags, one-line errors, exit codes. Imports no TensorFlow."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from tfdist.console import folders, shadowed_packages, streams, threads, tracebacks
from tfdist.errors import ConfigurationError, Preempted, TfdistError, did_you_mean

#: Shells show 128 + the signal's number; an interrupt is signal 2.
INTERRUPTED = 130


def run(main: Callable[[], int | None]) -> int:
    """Calls `main`, which may import TensorFlow, and returns the exit code of the process.

    Args:
        main: Runs the command and returns its exit code, or None for 0. It raises errors for the
            user as `TfdistError`.

    Returns:
        The exit code of `main`. That of a `TfdistError`, which is printed without a traceback: 1,
        or 75 if a device server was lost. 1 for any other error, which is printed with the user's
        frames (`tracebacks`). 130 for an interrupt. After a preemption, 138
        (`tfdist.errors.REQUEUE`) if there is a checkpoint, from which the same command resumes, or
        143.
    """
    try:
        streams.guard()
        folders.working()
        folders.provide_home()
        shadowed_packages.put_first()
        from pipelines.console.quiet import quieten_tensorflow

        quieten_tensorflow()
        return main() or 0
    except TfdistError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stopped:
        if threads.failed():
            return 1
        return stopped.exit_code if isinstance(stopped, Preempted) else INTERRUPTED
    except Exception as error:  # raised by a recipe or a callback, or a bug in tfdist
        from pipelines.errors import DataError

        if isinstance(error, DataError):  # its message names the file or URL, and what to do
            print(f"error: {error}", file=sys.stderr)
        else:
            tracebacks.show(error)
        return 1
    finally:
        # Iterators over data that an interrupt or an error has left would otherwise be deleted
        # while the interpreter ends, where waiting for a Python function in them never returns.
        gc.collect()


def main(function: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Makes a command's `main` of a function of its arguments, which `run` calls."""

    @functools.wraps(function)
    def run_with(arguments: Sequence[str] | None = None) -> int:
        return run(lambda: function(arguments))

    return run_with


def parser(program: str, description: str) -> ArgumentParser:
    """Returns an empty parser for `parse`; add arguments as in argparse."""
    from pipelines.console import flags  # after `shadowed_packages.put_first`

    return flags.parser(program, description)


def parse(
    parser: ArgumentParser,
    arguments: Sequence[str] | None,
    *,
    defaults: bool = True,
    subparsers: Mapping[str, ArgumentParser] = MappingProxyType({}),
) -> Namespace:
    """Returns the values of a command line; `--help` prints and exits.

    Args:
        parser: Defines the flags.
        arguments: The command line without the program's name; None for `sys.argv`.
        defaults: Whether to return the defaults of flags that are not on the command line.
        subparsers: The parser of each subcommand, for messages.

    Raises:
        ConfigurationError: A flag is unknown or has an invalid value.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return parser.parse_args(words, defaults=defaults)
    except argparse.ArgumentError as error:
        from pipelines.console import flags  # after `shadowed_packages.put_first`

        used, program = parser, parser.prog
        if words and words[0] in subparsers:
            used, program = subparsers[words[0]], f"{program} {words[0]}"
        message = flags.problem(error, used, words, program=program, suggest=did_you_mean)
        raise ConfigurationError(message) from None


def run_one_of(
    commands: Mapping[str, str],
    program: str,
    description: str,
    arguments: Sequence[str] | None,
    complete: Callable[[str, dict[str, Any]], None] = lambda name, values: None,
) -> None:
    """Parses a command line that begins with a subcommand, and runs the subcommand.

    Args:
        commands: Module of each subcommand, with a `DESCRIPTION`, a function `add_arguments` that
            adds its flags, and a function `run` that takes their values.
        program: As for `parser`.
        description: As for `parser`.
        arguments: As for `parse`.
        complete: Takes the name of the subcommand and the values of its flags, and changes the
            values to the arguments of `run`.

    Raises:
        TfdistError: The command line is invalid, or the subcommand failed.
    """
    main_parser = parser(program, description)
    subcommands = main_parser.add_subcommands(dest="subcommand")
    subparsers = {}
    for name, path in commands.items():
        module = importlib.import_module(path)
        subparsers[name] = subparser = parser(f"{program} {name}", module.DESCRIPTION)
        module.add_arguments(subparser)
        subcommands.add_subcommand(name, subparser, help=module.DESCRIPTION)
    parsed = parse(main_parser, arguments, subparsers=subparsers)
    name = parsed.subcommand
    values = parsed[name].as_dict()
    complete(name, values)
    importlib.import_module(commands[name]).run(**values)
