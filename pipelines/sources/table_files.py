"""Reads the files of a table (CSV, TSV, JSON Lines, Parquet, Arrow) as one Arrow table.

`read_table` reads one by its location, with its splits. The source `table` and recipes share this
module. Folders such as `species=setosa/` are columns, as for Spark and pandas; the index that
pandas hides is not one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines import storage
from pipelines.errors import DataError
from pipelines.sources import delimited, json_lines, types
from pipelines.sources import splits as splits_of
from pipelines.sources.account import Account
from pipelines.sources.arrow import dataset, ipc, pa, parquet, pc
from pipelines.sources.encodings import with_compressed
from pipelines.sources.source import Options, add_files, files_below, list_again, suffix_of
from pipelines.storage import AnyPath, RemotePath

_TEXT_SUFFIXES = (*delimited.DELIMITERS, *json_lines.SUFFIXES)
SUFFIXES = with_compressed(*_TEXT_SUFFIXES) | {".parquet", ".pq", ".arrow", ".feather"}
#: What to read if nothing else can be.
FALLBACK_SUFFIXES = with_compressed(json_lines.JSON)
#: Suffixes for messages.
EXPECTED = ", ".join((*_TEXT_SUFFIXES, ".parquet", ".arrow"))
#: Options of every reader of tables.
OPTIONS = frozenset({"column", "encoding", "delimiter", "quote", "header"})
_NUM_NAMED = 3
_NUM_LOOKED_AT, _MOST_WORDS = 100, 3
_UNNAMED = "Unnamed: {}"  # as pandas names them


class Rows(NamedTuple):
    """The rows of all files.

    Attributes:
        table: The Arrow table, with columns of images as their bytes.
        readings: What each column was read as.
        cells: Names of columns of delimited text.
        notes: How files were decoded, where it is not the usual way, and whether it is a guess.
        files: The files.
        starts: The number of the first row of each file, and the number of rows.
        has_header: Whether the first row of delimited text has the names of the columns.
    """

    table: Any
    readings: list[types.Reading]
    cells: frozenset[str]
    notes: dict[AnyPath, tuple[str, bool]]
    files: list[AnyPath]
    starts: np.ndarray
    has_header: bool = True

    def locate(self, row: int) -> str:
        """Returns the file and the row in it, counted from 1, of a row of the table."""
        return _located(self.files, self.starts, row, has_header=self.has_header)

    def described(self) -> str:
        """Returns lines with the columns, what they were read as, and why."""
        return types.described(self.readings)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the columns as arrays of numbers or text; missing values are NaN or empty.

        Dates are days since 1970-01-01.

        Raises:
            DataError: A column has lists.
        """
        arrays = {}
        for reading in self.readings:
            if reading.kind == "left out":
                continue
            column = self.table[reading.name]
            if pa.types.is_nested(column.type):
                raise DataError(
                    f"{self.files[0]}: column {reading.name!r} contains {column.type}; expected a "
                    f"number or text in each row. To omit it, use --column {reading.name}=ignore"
                )
            if reading.kind == "date":
                column = types.days(column)
            elif pa.types.is_null(column.type) or (
                pa.types.is_boolean(column.type) and column.null_count
            ):
                column = column.cast(pa.float64())
            elif not (pa.types.is_primitive(column.type) and not pa.types.is_temporal(column.type)):
                column = column.cast(pa.string()).fill_null("")
            arrays[reading.name] = column.to_numpy()
        return arrays

    def report(self, account: Account, without: Sequence[int] | np.ndarray = ()) -> None:
        """Adds the rows, without those that are dropped, and how files were decoded."""
        account.use("rows", len(self.table) - len(without))
        places = map(self.locate, map(int, without[:_NUM_NAMED]))
        reason = "has empty cells (--drop-gaps)"
        account.leave_out("rows", reason, *places, count=len(without))
        for file, (note, is_guess) in self.notes.items():
            account.change("files", note, file.name, guessed=is_guess)

    def file_of(self, row: int) -> AnyPath:
        """Returns the file of a row of the table."""
        return self.files[int(np.searchsorted(self.starts, row, "right")) - 1]


def read(files: Sequence[AnyPath], root: AnyPath, options: Options) -> Rows:
    """Reads files with the same columns, in any order.

    Args:
        files: The files.
        root: The folder whose subfolders may be columns (`year=2020/`).
        options: Those of `OPTIONS` overrule what is detected.

    Raises:
        DataError: A file is not a table, the files have different columns, or a cell does not have
            the type that was chosen for its column.
    """
    given = types.parse(options.column)
    parts = []
    for file in files:
        try:
            part = _without_index(_read_file(file, options), given)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: cannot be read as a table: {error}") from None
        parts.append(_as_given(_with_partitions(part, file, root), given))
        _check_names(file, parts[-1].table, files[0], parts[0].table)
    starts = np.cumsum([0, *(len(part.table) for part in parts)])
    names = parts[0].table.column_names
    try:
        table = pa.concat_tables(
            [part.table.select(names) for part in parts], promote_options="permissive"
        )
    except pa.ArrowException:
        raise _other_types([part.table for part in parts], files) from None
    has_header = options.header in (None, delimited.FIRST)
    cells = frozenset[str]().union(*(part.cells for part in parts))
    table, readings = types.read_columns(
        table,
        cells,
        given,
        lambda row: _located(files, starts, row, has_header=has_header),
        decimal_comma=any(part.is_semicolon for part in parts),
    )
    left_out = {name: why for part in parts for name, why in part.left_out.items()}
    readings += [types.Reading(name, "left out", why) for name, why in left_out.items()]
    notes = {
        file: (part.note, part.is_guess)
        for file, part in zip(files, parts, strict=True)
        if part.note
    }
    return Rows(table, readings, cells, notes, list(files), starts, has_header)


def _as_given(part: _Part, given: Mapping[str, str]) -> _Part:
    """Turns columns to text, and those to ignore to nothing, so that all files are equal."""
    table = part.table
    for i, field in enumerate(table.schema):
        if given.get(field.name) == "text" and not pa.types.is_nested(field.type):
            table = table.set_column(i, field.name, table[field.name].cast(pa.string()))
        elif given.get(field.name) == "ignore":
            table = table.set_column(i, field.name, pa.nulls(len(table)))
    return part._replace(table=table)


def _other_types(tables: Sequence[Any], files: Sequence[AnyPath]) -> DataError:
    for number, table in enumerate(tables):
        for field in table.schema:
            try:
                columns = [table.select([field.name]) for table in tables[: number + 1]]
                pa.concat_tables(columns, promote_options="permissive")
            except pa.ArrowException:
                kinds = [table.schema.field(field.name).type for table in tables]
                kind, other = next(
                    pair for pair in zip(kinds, files, strict=True) if pair[0] != field.type
                )
                return DataError(
                    f"{files[number]}: column {field.name!r} has {field.type}, and {other} has "
                    f"{kind}; convert one of them, or use --column {field.name}=text or "
                    f"--column {field.name}=ignore"
                )
    raise AssertionError("every column has one type")


class _Part(NamedTuple):
    """The contents of one file.

    Attributes:
        table: Its rows.
        cells: Names of columns of text whose types are not known.
        note: How the file was decoded, if not in the usual way.
        is_guess: Whether its encoding is a guess.
        is_semicolon: Whether semicolons separate the cells, so that commas may be decimal ones.
        left_out: Reasons by the name of each column that is left out.
    """

    table: Any
    cells: frozenset[str] = frozenset()
    note: str = ""
    is_guess: bool = False
    is_semicolon: bool = False
    left_out: Mapping[str, str] = {}


def _read_file(file: AnyPath, options: Options) -> _Part:
    if _is_parquet(file):
        return _Part(_flat(parquet.ParquetFile(opened(file)).read()))
    suffix = suffix_of(file)
    if suffix in (".parquet", ".pq"):
        raise DataError(f"{file}: is not a Parquet file; download or write it again")
    if suffix in (".arrow", ".feather"):
        return _Part(_flat(open_arrow(file).read_all()))
    if suffix in (*json_lines.SUFFIXES, json_lines.JSON):
        table, encoding, mixed = json_lines.read(file, options)
        return _Part(_flat(table), mixed, encoding.note, encoding.is_guessed)
    table, dialect = delimited.read(file, options)
    notes, suspicious = [dialect.note] if dialect.note else [], list[str]()
    if dialect.names is None:
        _check_repeated_header(table, file)
    if options.header is None:
        given = types.parse(options.column)
        _check_first_rows(table, given, file)
        suspicious = _names_like_data(table, given)
    if suspicious:
        notes.append(f"with {suspicious[0]!r} as the name of a column")
    if 2 * len(suspicious) >= len(table.column_names) > 0:
        raise DataError(
            f"{file}: is the first row one of data? It has {suspicious[0]!r} as the name of a "
            "column. Pass --header none or the names of the columns as --header A,B,C if it is, "
            "and --header first if it has the names"
        )
    names = [name or _UNNAMED.format(i) for i, name in enumerate(table.column_names)]
    return _Part(
        table.rename_columns(names),
        frozenset(names),
        ", ".join(notes),
        dialect.encoding.is_guessed or bool(suspicious),
        dialect.delimiter == ";",
    )


def _names_like_data(table: Any, given: Mapping[str, str]) -> list[str]:
    """Returns the names of columns that are numbers, or also values of their columns."""
    names = table.column_names
    if names == [*map(str, range(len(names)))] or len({*names}) < len(names):  # as pandas names
        return []
    names = [name for name in names if name and name not in given]
    return [n for n in names if types.is_number(n) or pc.any(pc.equal(table[n], n)).as_py()]


def _check_first_rows(table: Any, given: Mapping[str, str], file: AnyPath) -> None:
    """Raises `DataError` if a row of words precedes numbers: names below a title, or units."""
    problem = ""
    for name, column in zip(table.column_names, table.columns, strict=True):
        are_numbers = types.are_numbers(column.slice(0, _NUM_LOOKED_AT)).to_pylist()
        if True not in are_numbers:
            continue
        first = are_numbers.index(True)
        if False not in are_numbers[:first] or False in are_numbers[first:] or first > _MOST_WORDS:
            return  # some numbers begin in the first row, or are mixed with words
        row = are_numbers.index(False)
        if name not in given and are_numbers.count(True) > 1:
            problem = problem or (
                f"{file}: row {row + 1} below the header has {column[row].as_py()!r} in column "
                f"{name!r}, and numbers follow. Remove it, with what is above the names of the "
                f"columns, or use --column {shlex.quote(f'{name}=text')}"
            )
    if problem:
        raise DataError(problem)


def _check_repeated_header(table: Any, file: AnyPath) -> None:
    """Raises `DataError` if a row repeats the names, as where files were put together."""
    names = table.column_names
    if len(names) > 1 and len(set(names)) == len(names):
        equal = [pc.equal(pc.utf8_ltrim(table[name], "\ufeff"), name) for name in names]
        row = pc.index(functools.reduce(pc.and_, equal), True).as_py()
        if row >= 0:
            raise DataError(
                f"{file}: row {row + 1} below the header repeats the names of the columns; remove "
                "it: files that were put together keep one header only"
            )


def _flat(table: Any) -> Any:
    """Replaces images, which are structs, by their bytes, and other structs by their fields.

    Those of a list of structs, as the messages of a conversation, become lists.
    """
    for i, field in enumerate(table.schema):
        if is_image(field):
            table = table.set_column(i, field.name, pc.struct_field(table[field.name], "bytes"))
    metadata = table.schema.metadata
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):  # of other files, it may be plain
            column = table[field.name].cast(field.type.value_type)
            table = table.set_column(i, field.name, column)
    for name, kind in zip(table.column_names, table.schema.types, strict=True):
        if "list" in str(kind) and pa.types.is_struct(getattr(kind, "value_type", kind)):
            rows = pa.concat_arrays(table[name].chunks)
            table = table.drop_columns([name])
            for field in kind.value_type:
                values = pc.struct_field(rows.values, field.name)
                lists = type(rows).from_arrays(rows.offsets, values)
                table = table.append_column(f"{name}.{field.name}", lists)
    return table.replace_schema_metadata(metadata)


def _without_index(part: _Part, given: Mapping[str, str]) -> _Part:
    """Removes the index that pandas wrote, unless its type is given, and columns of nothing."""
    table, left_out = part.table, {}
    with contextlib.suppress(KeyError, TypeError, ValueError):
        hidden = json.loads(table.schema.metadata[b"pandas"])["index_columns"]
        left_out = {n: "index of pandas" for n in hidden if n in table.column_names}
    for i, name in enumerate(table.column_names):
        if name in part.cells and name == _UNNAMED.format(i):
            column = table[name]
            if column.null_count == len(column):
                left_out[name] = "has neither a name nor values"
            elif i == 0 and types.are_integers(column) and len(pc.unique(column)) == len(column):
                left_out[name] = "row numbers without a name, as the index of pandas"
    left_out = {name: why for name, why in left_out.items() if name not in given}
    return part._replace(table=table.drop_columns([*left_out]), left_out=left_out)


def _with_partitions(part: _Part, file: AnyPath, root: AnyPath) -> _Part:
    """Adds the columns of folders such as `species=setosa`, as text of an unknown type."""
    path = str(storage.relative(file, root))
    folders = [folder.partition("=") for folder in path.split("/")[:-1]]
    names = [name for name, equals, _ in folders if name and equals]
    if not names:
        return part
    partitioning = dataset.HivePartitioning(pa.schema([(name, pa.string()) for name in names]))
    keys = dataset.get_partition_keys(partitioning.parse(path))
    table = part.table
    added = [name for name in names if name not in table.column_names]
    for name in names:
        if name in added:
            column = pa.array([keys.get(name)] * len(table), pa.string())
            table = table.append_column(name, column)
        elif not _are_all(table[name], keys.get(name)):
            raise DataError(
                f"{file}: is in a folder {name}={keys.get(name)}, and has other values in its "
                f"column {name!r}; rename one of them"
            )
    return part._replace(table=table, cells=part.cells | {*added})


def _are_all(column: Any, value: str | None) -> bool:
    """Returns whether all cells have the value of a folder, such as 7 in the folder `month=07`."""
    if value is None:
        return int(column.null_count) == len(column)
    try:
        if types.is_number(value):
            return bool(pc.all(pc.equal(column.cast(pa.float64()), float(value))).as_py())
        return bool(pc.all(pc.equal(column.cast(pa.string()), value)).as_py())
    except pa.ArrowException:
        return False


def _check_names(file: AnyPath, table: Any, first: AnyPath, other: Any) -> None:
    names, expected = table.column_names, other.column_names
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(
            f"{file}: has several columns {repeated[0]!r}. Rename or remove them; the first row "
            "contains the names."
        )
    for one, another, missing in (
        (file, first, set(expected) - set(names)),
        (first, file, set(names) - set(expected)),
    ):
        if missing:
            raise DataError(
                f"{one}: has no column {min(missing)!r}, which {another} has. All files of a "
                "table need the same columns."
            )


def _located(files: Sequence[AnyPath], starts: np.ndarray, row: int, *, has_header: bool) -> str:
    i = int(np.searchsorted(starts, row, "right")) - 1
    is_below = has_header and suffix_of(files[i]) in delimited.DELIMITERS
    below = " below the header" if is_below else ""
    return f"{files[i]}: row {row - starts[i] + 1}{below}"


def is_image(field: Any) -> bool:
    """Returns whether a field of a schema has images, as Hugging Face's `datasets` stores them."""
    kind = field.type
    return hasattr(kind, "num_fields") and {kind.field(i).name for i in range(kind.num_fields)} == {
        "bytes",
        "path",
    }


def schema(file: AnyPath) -> Any:
    """Returns the schema that a file declares; empty for text."""
    if file.suffix.lower() in (".arrow", ".feather"):
        return open_arrow(file).schema
    return parquet.read_schema(opened(file)) if _is_parquet(file) else ()


def open_arrow(file: AnyPath) -> Any:
    """Opens a file that `datasets` or pandas wrote: a stream of Arrow's IPC, or a file of it."""

    def source() -> Any:
        return opened(file) if isinstance(file, RemotePath) else pa.memory_map(str(file))

    try:
        return ipc.open_stream(source())
    except pa.ArrowInvalid:
        return ipc.open_file(source())


def opened(file: AnyPath) -> Any:
    """Returns what pyarrow reads: the path of a local file, or an opened remote file."""
    return file.open("rb") if isinstance(file, RemotePath) else str(file)


def _is_parquet(file: AnyPath) -> bool:
    with file.open("rb") as begin:
        return begin.read(4) == b"PAR1"


def suffixes_in(folder: AnyPath) -> frozenset[str]:
    """Returns the suffixes of tables: that of JSON only in a folder without any other."""
    return SUFFIXES if files_below(folder, SUFFIXES) else FALLBACK_SUFFIXES


def read_table(
    location: str | Path,
    *,
    column: Sequence[str] = (),
    splits: str | None = None,
    **dialect: str | None,
) -> tuple[dict[str, Rows], Account]:
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
        splits: As for `pipelines.find_splits`.
        **dialect: `encoding`, `delimiter`, `quote` and `header`, as the flags of `pipelines.pack`.

    Returns:
        The rows by split, all as `train` if there are no splits, and the account of the files.

    Raises:
        DataError: There is no table, or a file cannot be read as one.
    """
    path, options = Path(location), Options.model_validate({"column": tuple(column), **dialect})
    list_again()
    suffixes = suffixes_in(path)
    if path.is_dir():
        folders = splits_of.split_folders(path, splits)
        files = {name: files_below(folder, suffixes) for name, folder in folders.items()}
        files = files or splits_of.split_files(path, suffixes, splits)
        files = files or {"train": files_below(path, suffixes)}
    else:
        files = {"train": [path]}
    if not files.get("train"):
        raise DataError(
            f"{location}: expected a {EXPECTED} file or a folder of them, with training "
            "rows if it has splits"
        )
    root = path if path.is_dir() else path.parent
    rows = {name: read(of_split, root, options) for name, of_split in files.items()}
    account, used = Account(), [file for of_split in files.values() for file in of_split]
    if path.is_dir():
        add_files(account, used, path, "not of this table")
    else:
        account.use("files", 1)
    for part in rows.values():
        part.report(account)
    types.report(rows["train"].readings, account)
    return rows, account
