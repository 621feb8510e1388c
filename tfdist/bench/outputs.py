"""The flags of a benchmark's files, and what goes into them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from tfdist.console import files, table_files, tables


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--json", metavar="FILE.json", help="where to write the results")
    parser.add_argument("--table", metavar="FILE", help="where to write the table, .md or .csv")
    parser.add_argument("--chart", metavar="FILE.png", help="where to draw it")


def check(json: str | None, table: str | None, chart: str | None) -> None:
    """Finds files that cannot be, before anything is measured.

    Raises:
        ConfigurationError: There is one.
    """
    table_files.check(json, ".json")
    table_files.check(table, ".md", ".csv")
    table_files.check(chart, ".png")


def show(
    header: Sequence[str], rows: Sequence[Sequence[str]], title: str, table: str | None
) -> None:
    """Prints a table, and writes it where wanted."""
    tables.numbers(header, rows, title=title)
    if table:
        table_files.write(Path(table), header, rows)


def draw(path: str | None, paint: Callable[[Any], None], width: float = 7) -> None:
    """Writes a picture where one is wanted.

    Args:
        path: The PNG file; None: none.
        paint: Draws into a matplotlib figure.
        width: Of it, in inches.
    """
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.5), layout="constrained")
    paint(figure)
    with files.replacing(Path(path)) as temporary:
        figure.savefig(temporary, dpi=100)
