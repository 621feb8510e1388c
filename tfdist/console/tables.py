"""Tables and text on the terminal, of all commands in one manner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Plain, whatever brackets it has; or with a style.
Cell = str | Text

_console = Console(highlight=False, markup=False)


def facts(*groups: Iterable[Sequence[Cell]]) -> None:
    """Prints names and what is known of each, with a line between two groups.

    Args:
        groups: Rows of as many cells each: the name first; the last may take several lines.
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
    """Prints rows below a header.

    Args:
        header: Of the columns.
        rows: Of as many cells.
        title: Above it.
        num_names: Columns of words, at the left side of their cells as numbers are at the right.
    """
    grid = Table(title=title or None, title_justify="left")
    for place, heading in enumerate(header):
        grid.add_column(heading, justify="left" if place < num_names else "right")
    for row in rows:
        grid.add_row(*row)
    _console.print(grid)


def text(words: str) -> None:
    """Prints words, in lines as wide as the terminal."""
    _console.print(words)
