"""`read_table`: the rows of a table in memory, by split, and the account of its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelines.errors import DataError
from pipelines.sources import splits as splits_of
from pipelines.sources import table_files, types
from pipelines.sources.account import Account
from pipelines.sources.source import Options, files_below, list_again, listing


def read_table(
    location: str | Path,
    *,
    column: Sequence[str] = (),
    encoding: str | None = None,
    delimiter: str | None = None,
    quote: str | None = None,
    splits: str | None = None,
) -> tuple[dict[str, table_files.Rows], Account]:
    r"""Reads a table of CSV, TSV, JSON Lines, Parquet or Arrow files into memory.

    Example:
        >>> _ = Path("iris.csv").write_text("width,species\n1.5,setosa\n2.5,virginica\n")
        >>> rows, account = pipelines.read_table("iris.csv")
        >>> print(rows["train"].described())
        column   read as  why
        width    number   all cells are numbers
        species  text     no numbers, dates or booleans

    Args:
        location: A file, or a folder of files with the same columns.
        column: `NAME=TYPE` for each column whose type is not as it seems.
        encoding: Encoding of text files; None: detected.
        delimiter: The character between cells of CSV files; None: detected.
        quote: The character around cells of CSV files, or `none`.
        splits: As for `pipelines.find_splits`.

    Returns:
        The rows by split, all as `train` if there are no splits, and what became of the files.

    Raises:
        DataError: There is no table, or a file cannot be read as one.
    """
    path, suffixes = Path(location), table_files.SUFFIXES
    options = Options(column=tuple(column), encoding=encoding, delimiter=delimiter, quote=quote)
    list_again()
    if path.is_dir():
        folders = splits_of.split_folders(path, splits)
        files = {name: files_below(folder, suffixes) for name, folder in folders.items()}
        files = files or splits_of.split_files(path, suffixes, splits)
        files = files or {"train": files_below(path, suffixes)}
    else:
        files = {"train": [path]}
    if not files.get("train"):
        raise DataError(
            f"{location}: expected a {', '.join(suffixes)} file or a folder of them, with training "
            "rows if it has splits"
        )
    root = path if path.is_dir() else path.parent
    rows = {name: table_files.read(of_split, root, options) for name, of_split in files.items()}
    account = Account()
    account.use("files", sum(map(len, files.values())))
    if path.is_dir():
        used = {file for of_split in files.values() for file in of_split}
        others = [file.name for file in listing(path).files if file not in used]
        account.leave_out("files", "not of this table", *others)
        account.add_clutter("files", listing(path).num_clutter)
    for part in rows.values():
        part.report(account)
    types.report(rows["train"].readings, account)
    return rows, account
