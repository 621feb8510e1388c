"""The manner of every command here: flags, one-line errors, exit codes. Imports no TensorFlow."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser

from pipelines.errors import DataError
from pipelines.quiet import quieten_tensorflow

#: Shells show 128 + the signal's number; an interrupt is signal 2.
INTERRUPTED = 130


def parser(module: str, description: str) -> ArgumentParser:
    """An empty parser for `python -m pipelines.MODULE`; arguments are added as to argparse."""
    return ArgumentParser(
        prog=f"python -m pipelines.{module}",
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
        # What is not given is left to the command's own default, and to the help's words.
        argument_default=argparse.SUPPRESS,
    )


def run(
    parser: ArgumentParser, command: Callable[..., None], arguments: Sequence[str] | None = None
) -> int:
    """Parses a command line, calls `command` with what it holds, and returns the exit code.

    Args:
        parser: knows the arguments; `-` in their names is `_` in the command's parameters.
        command: prints what it found; raises what the user should know.
        arguments: the command line without the program's name, or None for this process's.

    Returns:
        0; 1 for an error, which is printed as one line; 130 for an interrupt.
    """
    quieten_tensorflow()
    try:
        command(**_values(parser, arguments))
    except argparse.ArgumentError as error:
        message = " ".join(str(error).split()) + _hint(parser, arguments)
        return _fail(f"{message}\n{parser.prog} --help lists what there is.")
    except DataError as error:
        return _fail(str(error))
    except OSError as error:  # a full disk, no permission: the system's words name the file
        name = f"{error.filename}: " if error.filename else ""
        return _fail(f"{name}{error.strerror or error}")
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _values(parser: ArgumentParser, arguments: Sequence[str] | None) -> dict[str, Any]:
    return dict(parser.parse_args(sys.argv[1:] if arguments is None else list(arguments)).as_dict())


def _hint(parser: ArgumentParser, arguments: Sequence[str] | None) -> str:
    """The flag that a misspelt one may have been."""
    known = re.findall(r"--[\w-]+", parser.format_help())
    for flag in (word.partition("=")[0] for word in arguments or sys.argv[1:]):
        if flag.startswith("--") and flag not in known:
            close = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
            return f". Did you mean {close[0]}?" if close else ""
    return ""


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1
