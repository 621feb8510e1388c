"""Tables as files, for pages and for spreadsheets."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from tfdist.console import files
from tfdist.errors import ConfigurationError


def check(path: str | None, *suffixes: str) -> None:
    """Finds a file of the wrong name, or without a folder, before anything is measured for it.

    Raises:
        ConfigurationError: It does not end as one of these, or its folder is not there.
    """
    if path is None:
        return
    if Path(path).suffix not in suffixes:
        raise ConfigurationError(f"{path}: expected a name that ends with {' or '.join(suffixes)}.")
    if not Path(path).parent.is_dir():
        raise ConfigurationError(f"{path}: there is no folder {Path(path).parent}: make it first.")


def write(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a table as Markdown, or as CSV where the name ends with `.csv`.

    Args:
        path: The file.
        header: Of the columns.
        rows: Of as many cells; numbers are to the right, behind the first column.
    """
    with files.replacing(path) as temporary, temporary.open("w", newline="") as file:
        if path.suffix == ".csv":
            csv.writer(file, lineterminator="\n").writerows([header, *rows])
            return
        ruler = ["---"] + ["---:"] * (len(header) - 1)
        file.writelines(f"| {' | '.join(line)} |\n" for line in (header, ruler, *rows))
