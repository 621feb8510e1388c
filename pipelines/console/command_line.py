"""Common behavior of the commands: flags, one-line errors, exit codes and printed tables.

Does not import TensorFlow.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from pipelines import flag_errors
from pipelines.errors import DataError
from pipelines.flag_help import HelpFormatter
from pipelines.format.feature import Feature
from pipelines.format.index import Index
from pipelines.quiet import quieten_tensorflow
from pipelines.storage import AnyPath

#: The exit code that shells use: 128 + the number of the signal (SIGINT is 2).
INTERRUPTED = 130


def parser(module: str, description: str) -> ArgumentParser:
    """Returns an empty parser for `python -m pipelines.MODULE`; add arguments as with argparse."""
    return ArgumentParser(
        prog=f"python -m pipelines.{module}",
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
        formatter_class=HelpFormatter,
        # The command's own defaults apply to flags that are not given.
        argument_default=argparse.SUPPRESS,
    )


def run(
    parser: ArgumentParser, command: Callable[..., None], arguments: Sequence[str] | None = None
) -> int:
    """Parses a command line, calls `command` with its values, and returns the exit code.

    Args:
        parser: The parser of the command.
        command: Takes the parsed values as keyword arguments, prints results and raises errors.
        arguments: The command line without the program's name; None: that of this process.

    Returns:
        0 on success, 1 after an error (printed as one line), 130 after an interrupt.
    """
    quieten_tensorflow()
    try:
        command(**_values(parser, arguments))
    except argparse.ArgumentError as error:
        message = flag_errors.reworded(error, parser.format_help()) + _hint(parser, arguments)
        return _fail(f"{message}\n{parser.prog} --help lists all flags.")
    except DataError as error:
        return _fail(str(error))
    except OSError as error:  # such as a full disk or a missing permission
        name = f"{error.filename}: " if error.filename else ""
        return _fail(f"{name}{error.strerror or error}")
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _values(parser: ArgumentParser, arguments: Sequence[str] | None) -> dict[str, Any]:
    return dict(parser.parse_args(sys.argv[1:] if arguments is None else list(arguments)).as_dict())


def _hint(parser: ArgumentParser, arguments: Sequence[str] | None) -> str:
    """Returns a suggestion for a misspelled flag, or an empty string."""
    known = re.findall(r"--[\w-]+", parser.format_help())
    for flag in (word.partition("=")[0] for word in arguments or sys.argv[1:]):
        if flag.startswith("--") and flag not in known:
            close = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
            return f". Did you mean {close[0]}?" if close else ""
    return ""


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


_NUM_LABELS_NAMED = 4


def print_summary(index: Index, directory: AnyPath) -> None:
    """Prints the contents of a folder: its size, then its features."""
    counts = [shard.num_records for shard in index.shards]
    sizes = [shard.num_bytes for shard in index.shards]
    print_facts(
        {
            "folder": str(directory),
            "source": index.source,
            "records": f"{index.num_records:,}",
            "shards": f"{index.num_shards}, {_range(counts)} records and "
            f"{decimal(min(sizes, default=0))} to {decimal(max(sizes, default=0))} each",
            "size": decimal(index.num_bytes),
            "compression": index.compression or "none",
        }
    )
    print_table(
        ("feature", "dtype", "shape", "encoding", "labels"),
        ((f.name, f.dtype, _shape(f), f.encoding, _labels(f)) for f in index.features),
    )


def print_facts(rows: dict[str, str]) -> None:
    """Prints a table of names and values."""
    grid = Table(show_header=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, value)
    _print(grid)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table with a header."""
    grid = Table(*header)
    for row in rows:
        grid.add_row(*row)
    _print(grid)


def _print(grid: Table) -> None:
    Console(highlight=False, markup=False).print(grid)


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts, default=0), max(counts, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _shape(feature: Feature) -> str:
    return " x ".join("?" if dim is None else str(dim) for dim in feature.shape) or "scalar"


def _labels(feature: Feature) -> str:
    names = feature.label_names
    if not names:
        return ""
    shown = ", ".join(names[:_NUM_LABELS_NAMED])
    return f"{len(names)}: {shown}" + (", ..." if len(names) > _NUM_LABELS_NAMED else "")
