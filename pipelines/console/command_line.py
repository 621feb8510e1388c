"""Common behavior of the commands: flags, one-line errors, exit codes and printed tables.

Does not import TensorFlow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from pipelines.console import flags
from pipelines.console.quiet import quieten_tensorflow
from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.format.index import Index
from pipelines.storage import AnyPath

#: The exit code that shells use: 128 + the number of the signal (SIGINT is 2).
INTERRUPTED = 130


def parser(module: str, description: str) -> ArgumentParser:
    """Returns an empty parser for `python -m pipelines.MODULE`; add arguments as with argparse."""
    # The command's own defaults apply to flags that are not given.
    return flags.parser(
        f"python -m pipelines.{module}", description, argument_default=argparse.SUPPRESS
    )


def run(
    parser: ArgumentParser, command: Callable[..., None], arguments: Sequence[str] | None = None
) -> int:
    """Parses a command line, calls `command` with its values, and returns the exit code.

    Returns:
        0 on success, 1 after an error (printed as one line), 130 after an interrupt.
    """
    quieten_tensorflow()
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        command(**parser.parse_args(words).as_dict())
    except argparse.ArgumentError as error:
        return _fail(flags.problem(error, parser, words))
    except DataError as error:
        return _fail(str(error))
    except OSError as error:  # such as a full disk or a missing permission
        name = f"{error.filename}: " if error.filename else ""
        return _fail(f"{name}{error.strerror or error}")
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


_NUM_LABELS_NAMED = 4


def print_summary(index: Index, directory: AnyPath) -> None:
    """Prints the contents of a folder: its size, then its features."""
    counts = [shard.num_records for shard in index.shards] or [0]
    sizes = [shard.num_bytes for shard in index.shards]
    low, high = min(counts), max(counts)
    numbers = str(low) if low == high else f"{low} to {high}"
    print_facts(
        {
            "folder": str(directory),
            "source": index.source,
            "records": f"{index.num_records:,}",
            "shards": f"{index.num_shards}, {numbers} records and "
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


def _shape(feature: Feature) -> str:
    return " x ".join("?" if dim is None else str(dim) for dim in feature.shape) or "scalar"


def _labels(feature: Feature) -> str:
    names = feature.label_names
    if not names:
        return ""
    shown = ", ".join(names[:_NUM_LABELS_NAMED])
    return f"{len(names)}: {shown}" + (", ..." if len(names) > _NUM_LABELS_NAMED else "")
