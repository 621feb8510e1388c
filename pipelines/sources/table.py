"""Tables: CSV, TSV or Parquet, one file or a folder of files with the same columns.

The table is held in memory by every worker, in Arrow's compact form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources import gaps
from pipelines.sources.source import Example, Options, Source, files_below, fingerprint

OPTIONS = frozenset({"label", "fill", "drop_gaps"})
_SUFFIXES = (".csv", ".tsv", ".parquet")
_ROWS_AT_ONCE = 1000
#: Arrow's names of the types that are stored under a name of NumPy's.
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"} | {
    "uint32": "int64",
    "uint64": "int64",
}
_NUMBERS = ("bool", "uint8", "int8", "uint16", "int16", "int32", "int64", *_DTYPES)


def fits(location: str) -> bool:
    """Whether the location is a table or a folder of tables."""
    path = Path(location)
    return bool(files_below(path, _SUFFIXES)) if path.is_dir() else path.suffix in _SUFFIXES


class Table(Source):
    """Examples that are the rows of a table, with its columns for features."""

    def __init__(self, files: Sequence[Path], options: Options) -> None:
        self._files, self._label = list(files), (label := options.label)
        self._fill, self._drop = gaps.parse_fill(options.fill), options.drop_gaps
        self._table: Any = None
        self._length = self._loaded().num_rows
        if self._length == 0:  # its columns have no types
            raise DataError(f"{files[0]}: expected rows, found none")
        self._classes = _classes(self._loaded(), label) if label else ()
        self.features = tuple(self._feature(field) for field in self._loaded().schema)
        mark = fingerprint(files, files[0].parent, contents=True)
        self.description = f"table, {self._length} rows {mark}" + (f", {label}" if label else "")
        self.description += f", gaps filled: {self._fill}" if self._fill else ""

    def __len__(self) -> int:
        return self._length

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        numbers_of = {name: i for i, name in enumerate(self._classes)}
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            chunk = numbers[start : start + _ROWS_AT_ONCE]
            for row in self._loaded().take(chunk).to_pylist():
                if self._label:
                    row[self._label] = numbers_of[row[self._label]]
                yield row

    def __getstate__(self) -> dict[str, object]:
        """Every worker process reads the table itself."""
        return self.__dict__ | {"_table": None}

    def _loaded(self) -> Any:
        if self._table is None:
            self._table = _load(self._files, self._fill, self._drop)
        return self._table

    def _feature(self, field: Any) -> Feature:
        if field.name == self._label:
            return Feature(
                name=field.name, dtype="int64", encoding="list", label_names=self._classes
            )
        shape: tuple[int | None, ...] = ()
        kind = str(field.type)
        if hasattr(field.type, "value_type") and "list" in kind:
            shape = (getattr(field.type, "list_size", None),)
            kind = str(field.type.value_type)
        if kind in ("string", "binary"):
            return Feature(name=field.name, dtype="string", shape=shape, encoding="bytes")
        dtype = _DTYPES.get(kind, kind)
        # A list holds no float64; a vector of them is rounded by nobody if its length is known.
        encoding = "raw" if dtype == "float64" else "list"
        if kind not in _NUMBERS or (encoding == "raw" and None in shape):
            raise DataError(
                f"{self._files[0]}: column {field.name!r}: cannot store {field.type}; convert it "
                "to numbers (float32 in lists), text or binary, or drop it"
            )
        return Feature.model_validate(
            {"name": field.name, "dtype": dtype, "shape": shape, "encoding": encoding}
        )


def open_source(location: str, options: Options) -> Source:
    """Opens a table.

    Raises:
        DataError: pyarrow is not installed, or a file is no table or has other columns.
    """
    path = Path(location)
    files = files_below(path, _SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{location}: expected {', '.join(_SUFFIXES)} files, found none")
    return Table(files, options)


def _load(files: Sequence[Path], fill: Mapping[str, str], drop_gaps: bool) -> Any:
    """The rows of all files; text of any kind as text, times in the form of ISO 8601."""
    try:
        import pyarrow as pa
        from pyarrow import csv, parquet
    except ImportError:
        raise DataError("tables need pyarrow: pip install 'tfdist[tables]'") from None
    tables = []
    for file in files:
        delimiter = "\t" if file.suffix == ".tsv" else ","
        try:
            if _is_parquet(file):
                table = parquet.read_table(file)
            else:
                options = csv.ParseOptions(delimiter=delimiter)
                # A text that is left out is a gap too, and not the empty text.
                converting = csv.ConvertOptions(strings_can_be_null=True)
                table = csv.read_csv(file, parse_options=options, convert_options=converting)
            table = table.cast(pa.schema([_plain(pa, field) for field in table.schema]))
            tables.append(gaps.close(table, file, fill, drop_gaps))
        except pa.ArrowException as error:
            raise DataError(f"{file}: not a table that can be read: {error}") from None
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise DataError(f"{files[0].parent}: files of other columns: {error}") from None


def _is_parquet(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4) == b"PAR1"


def _plain(pa: Any, field: Any) -> Any:
    types, kind = pa.types, field.type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_temporal(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        kind = pa.string()
    elif types.is_large_binary(kind) or types.is_binary_view(kind):
        kind = pa.binary()
    return field.with_type(kind)


def _classes(table: Any, label: str) -> tuple[str, ...]:
    if label not in table.column_names:
        raise DataError(f"--label: expected one of {table.column_names}, got {label!r}")
    kind = str(table.schema.field(label).type)
    if kind != "string":
        raise DataError(
            f"--label: column {label!r} holds {kind}, not names; it needs no --label to be packed"
        )
    return tuple(sorted(name for name in table[label].unique().to_pylist()))
