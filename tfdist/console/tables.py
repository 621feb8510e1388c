"""Prints tables and text on the terminal in the same style for all commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    """Prints a table of numbers.

    Args:
        header: Column headings.
        rows: The cells of each row.
        title: Title above the table.
        num_names: Number of text columns, which come first. They are left-aligned, and columns of
            numbers right-aligned.
    """
    grid = Table(title=title or None, title_justify="left")
    for column, heading in enumerate(header):
        justify: Literal["left", "right"] = "left" if column < num_names else "right"
        # Wrap instead of truncating in narrow terminals, so that names and numbers can be copied.
        grid.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    _console.print(grid)


def text(words: str) -> None:
    """Prints text, wrapped to the width of the terminal."""
    _console.print(words)
