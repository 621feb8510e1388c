"""Writes tables as Markdown or CSV files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from tfdist.console import files
from tfdist.errors import ConfigurationError


def check(path: str | None, *suffixes: str, or_folder: bool = False) -> None:
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


def write(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
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
