"""Prints tables and text in the same style for all commands, and writes tables to files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tfdist.console import files
from tfdist.errors import ConfigurationError

#: Plain text, in which brackets have no special meaning, or styled text.
Cell = str | Text

_console = Console(highlight=False, markup=False)


def facts(*groups: Iterable[Sequence[Cell]]) -> None:
    """Prints a table of names and values, with a separator between groups of rows.

    Args:
        *groups: Rows with the same number of cells: first the name; the last cell may wrap.
    """
    rows = [list(group) for group in groups]
    grid = Table(show_header=False)
    grid.add_column(style="bold", no_wrap=True)
    num_cells = max((len(row) for group in rows for row in group), default=2)
    for _ in range(num_cells - 2):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for group in rows:
        grid.add_section()
        for row in group:
            grid.add_row(*row)
    _console.print(grid)


def numbers(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", num_names: int = 1
) -> None:
    """Prints a table of numbers, or a paragraph for each row in a terminal that is too narrow.

    Args:
        header: Column headings.
        rows: The cells of each row.
        title: Title above the table.
        num_names: Number of text columns, which come first. They are left-aligned, and columns of
            numbers right-aligned.
    """
    cells = [list(row) for row in rows]
    grid = Table(title=title or None, title_justify="left")
    widths = _narrow_widths(header, cells, num_names)
    if widths == []:
        _paragraphs(header, cells, title, num_names)
        return
    if widths:
        grid.padding = 0
    for column, heading in enumerate(header):
        justify: Literal["left", "right"] = "left" if column < num_names else "right"
        # Wrap instead of truncating in narrow terminals, so that names and numbers can be copied.
        width = widths[column] if widths else None
        grid.add_column(heading, justify=justify, overflow="fold", width=width)
    for row in cells:
        grid.add_row(*row)
    _console.print(grid)


def _narrow_widths(
    header: Sequence[str], cells: Sequence[Sequence[str]], num_names: int
) -> list[int] | None:
    """Returns widths of columns with which headings wrap rather than names and numbers.

    Returns:
        None if the table fits into the terminal. An empty list if its words and numbers do not even
        without padding.
    """
    columns = [[row[i] for row in cells] for i in range(len(header))]
    whole = [max(map(len, [name, *column])) for name, column in zip(header, columns, strict=True)]
    lines = len(header) + 1
    if sum(whole) + 2 * len(header) + lines <= _console.width:
        return None
    parts = [
        [part for cell in column for part in (cell.split() if i < num_names else [cell])]
        for i, column in enumerate(columns)
    ]
    words = [max([1, *map(len, column)]) for column in parts]
    room = _console.width - lines - sum(words)
    if room < 0:
        return []
    for i, heading in enumerate(header):
        more = min(max(len(heading) - words[i], 0), room)
        words[i], room = words[i] + more, room - more
    return words


def _paragraphs(
    header: Sequence[str], cells: Sequence[Sequence[str]], title: str, num_names: int
) -> None:
    if title:
        _console.print(title, style="italic")
    for row in cells:
        _console.print(", ".join(filter(None, row[:num_names])), style="bold")
        named = zip(header[num_names:], row[num_names:], strict=False)
        values = ", ".join(f"{name} {value}" for name, value in named if value)
        _console.print(Padding(values, (0, 0, 0, 4)))


def text(words: str) -> None:
    """Prints text, wrapped to the width of the terminal."""
    _console.print(words)


def check_path(path: str | None, *suffixes: str, or_folder: bool = False) -> None:
    """Checks the path of an output file before a measurement begins.

    Args:
        path: The file to write; None for no file.
        *suffixes: The accepted suffixes, such as `.csv`.
        or_folder: Whether to accept a path without a suffix, for a folder.

    Raises:
        ConfigurationError: The suffix is not supported, or the folder does not exist.
    """
    if path is None:
        return
    is_folder = or_folder and not Path(path).suffix
    if not is_folder and not path.endswith(suffixes):
        folder = ", or a folder without a suffix" if or_folder else ""
        raise ConfigurationError(
            f"{path}: expected a name that ends with {' or '.join(suffixes)}{folder}."
        )
    if not Path(path).parent.is_dir():
        raise ConfigurationError(
            f"{path}: the folder {Path(path).parent} does not exist. Create it first."
        )


def write_file(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a table as CSV if the name ends with `.csv`, otherwise as Markdown.

    Args:
        path: The file to write.
        header: Column headings.
        rows: The cells of each row. In Markdown, all columns but the first are right-aligned.
    """
    with files.replacing(path) as temporary, temporary.open("w", newline="") as file:
        if path.suffix == ".csv":
            csv.writer(file, lineterminator="\n").writerows([header, *rows])
            return
        ruler = ["---"] + ["---:"] * (len(header) - 1)
        file.writelines(f"| {' | '.join(line)} |\n" for line in (header, ruler, *rows))
