"""Tables: CSV, TSV, Parquet or Arrow, one file or a folder of files with the same columns.

Parquet and Arrow files of Hugging Face's `datasets` may have columns of images (`bytes` and `path`)
and the names of classes in their metadata. Both are stored as such.

Every worker holds the table in memory, in Arrow's compact format. Empty cells are an error unless
the user fills them or drops their rows.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format.feature import Feature, image_format
from pipelines.sources import images
from pipelines.sources.source import (
    Example,
    Options,
    Source,
    files_below,
    fingerprint,
    has_files,
    is_folder,
)
from pipelines.storage import AnyPath, RemotePath

OPTIONS = frozenset({"label", "fill", "drop_gaps"}) | images.OPTIONS
_SUFFIXES = SUFFIXES = (".csv", ".tsv", ".parquet", ".arrow")
_ROWS_AT_ONCE = 1000
#: Stored NumPy dtypes by Arrow's type names, where they differ.
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"} | {
    "uint32": "int64",
    "uint64": "int64",
}
_NUMBERS = ("bool", "uint8", "int8", "uint16", "int16", "int32", "int64", *_DTYPES)


def fits(location: str) -> bool:
    """Returns whether the location is a table or a folder of tables."""
    return has_files(location, _SUFFIXES)


class Table(Source):
    """Rows of a table as examples, with its columns as features."""

    def __init__(self, files: Sequence[AnyPath], root: AnyPath, options: Options) -> None:
        self._files, self._label = list(files), (label := options.label)
        self.files = self._files
        self._fill, self._drop = _parse_fill(options.fill), options.drop_gaps
        self._length = self._table.num_rows
        if self._length == 0:  # an empty CSV file has no column types
            raise DataError(f"{files[0]}: expected rows, found none")
        self._classes = _classes(self._table, label) if label else ()
        self._names = _class_names(files[0])
        self._images = {
            name: _coding(self._table[name], options) for name in _image_columns(files[0])
        }
        self.features = tuple(self._feature(field) for field in self._table.schema)
        if not self._images and any(name in options.given() for name in images.OPTIONS):
            raise DataError(f"{files[0]}: has no images, to which the image options apply")
        mark = fingerprint(files, root, contents=True)
        self.description = f"table, {self._length} rows {mark}" + (f", {label}" if label else "")
        self.description += "".join(
            f", {name}: {coding.description}" for name, coding in self._images.items()
        )
        self.description += f", gaps filled: {self._fill}" if self._fill else ""

    def __len__(self) -> int:
        return self._length

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        numbers_of = {name: i for i, name in enumerate(self._classes)}
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            chunk = numbers[start : start + _ROWS_AT_ONCE]
            for row in self._table.take(chunk).to_pylist():
                if self._label:
                    row[self._label] = numbers_of[row[self._label]]
                for name, coding in self._images.items():
                    row[name] = coding.encode(row[name], f"{self._files[0].parent}: {name}")
                yield row

    @functools.cached_property
    def _table(self) -> Any:
        return _load(self._files, self._fill, self._drop)

    def _feature(self, field: Any) -> Feature:
        if field.name == self._label:
            return Feature(
                name=field.name, dtype="int64", encoding="list", label_names=self._classes
            )
        if field.name in self._images:
            return self._images[field.name].feature(field.name)
        if names := self._names.get(field.name):
            return Feature(name=field.name, dtype="int64", encoding="list", label_names=names)
        shape: tuple[int | None, ...] = ()
        kind = str(field.type)
        if hasattr(field.type, "value_type") and "list" in kind:
            shape = (getattr(field.type, "list_size", None),)
            kind = str(field.type.value_type)
        if kind in ("string", "binary"):
            return Feature(name=field.name, dtype="string", shape=shape, encoding="bytes")
        dtype = _DTYPES.get(kind, kind)
        # A list cannot store float64; raw bytes can, but require a known length.
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
        DataError: pyarrow is not installed, or a file is not a table or has other columns.
    """
    path = storage.at(location)
    if not is_folder(path):
        return Table([path], path.parent, options)
    if files := files_below(path, _SUFFIXES):
        return Table(files, path if isinstance(path, RemotePath) else files[0].parent, options)
    raise DataError(f"{location}: expected {', '.join(_SUFFIXES)} files, found none")


def _load(files: Sequence[AnyPath], fill: Mapping[str, str], drop_gaps: bool) -> Any:
    """Returns the rows of all files, with times as ISO 8601 text."""
    try:
        import pyarrow as pa
        from pyarrow import csv, parquet
    except ImportError:
        raise DataError("tables require pyarrow: pip install 'tfdist[tables]'") from None
    tables = []
    for file in files:
        delimiter = "\t" if file.suffix == ".tsv" else ","
        try:
            if _is_parquet(file):
                table = _without_paths(parquet.read_table(_opened(file)))
            elif file.suffix == ".arrow":
                table = _without_paths(_arrow(file).read_all())
            else:
                options = csv.ParseOptions(delimiter=delimiter)
                # An empty text cell counts as empty, not as an empty string.
                converting = csv.ConvertOptions(strings_can_be_null=True)
                opened = _opened(file)
                table = csv.read_csv(opened, parse_options=options, convert_options=converting)
            table = table.cast(pa.schema([_plain(pa, field) for field in table.schema]))
            tables.append(_fill_empty_cells(table, file, fill, drop_gaps))
        except pa.ArrowException as error:
            raise DataError(f"{file}: not a readable table: {error}") from None
    try:
        return pa.concat_tables(tables)
    except pa.ArrowException as error:
        raise DataError(f"{files[0].parent}: files with different columns: {error}") from None


def _without_paths(table: Any) -> Any:
    """Replaces columns of images, which are structs, by the bytes of the images."""
    import pyarrow.compute as pc

    for place, field in enumerate(table.schema):
        if _is_image(field):
            table = table.set_column(place, field.name, pc.struct_field(table[field.name], "bytes"))
    return table


def _is_image(field: Any) -> bool:
    kind = field.type
    return hasattr(kind, "num_fields") and {kind.field(i).name for i in range(kind.num_fields)} == {
        "bytes",
        "path",
    }


def _image_columns(file: AnyPath) -> list[str]:
    return [field.name for field in _schema(file) if _is_image(field)]


def _schema(file: AnyPath) -> Any:
    from pyarrow import parquet

    if file.suffix == ".arrow":
        return _arrow(file).schema
    return parquet.read_schema(_opened(file)) if _is_parquet(file) else ()


def _arrow(file: AnyPath) -> Any:
    """Opens a file that `datasets` wrote: a stream of Arrow's IPC, or a file of it."""
    from pyarrow import ArrowInvalid, ipc, memory_map

    def opened() -> Any:
        return _opened(file) if isinstance(file, RemotePath) else memory_map(str(file))

    try:
        return ipc.open_stream(opened())
    except ArrowInvalid:
        return ipc.open_file(opened())


def _opened(file: AnyPath) -> Any:
    """Returns what pyarrow reads: the path of a local file, or an opened remote file."""
    return file.open("rb") if isinstance(file, RemotePath) else str(file)


def _class_names(file: AnyPath) -> dict[str, tuple[str, ...]]:
    """Returns the names of classes by column, from the metadata that `datasets` writes."""
    try:
        metadata = _schema(file).metadata[b"huggingface"]
        features = json.loads(metadata)["info"]["features"]
        return {
            name: tuple(feature["names"])
            for name, feature in features.items()
            if isinstance(feature, Mapping) and "names" in feature  # a ClassLabel
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _coding(column: Any, options: Options) -> images.ImageCoding:
    """Returns how the images of a column are stored."""
    names = []
    for number, value in enumerate(column):
        data = bytes(value.as_buffer()[:8])
        names.append(Path(f"{number}.{image_format(data) or 'other'}"))

    def open_image(path: Path) -> BinaryIO:
        return io.BytesIO(column[int(path.stem)].as_py())

    return images.coding_for(names, options, open_image)


def _is_parquet(file: AnyPath) -> bool:
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
            f"--label: column {label!r} contains {kind}, not class names; pack it without --label"
        )
    return tuple(sorted(name for name in table[label].unique().to_pylist()))


_NUM_NAMED = 3


def _parse_fill(given: Sequence[str]) -> dict[str, str]:
    """Parses `COLUMN=VALUE` texts to values by column.

    Raises:
        DataError: A text has an invalid format.
    """
    if wrong := [words for words in given if "=" not in words]:
        raise DataError(f"--fill: expected COLUMN=VALUE, got {wrong[0]!r}")
    return {column: value for column, _, value in (words.partition("=") for words in given)}


def _fill_empty_cells(table: Any, file: AnyPath, fill: Mapping[str, str], drop: bool) -> Any:
    """Returns a table without empty cells.

    Args:
        table: The Arrow table of one file.
        file: The file, for error messages.
        fill: Values of empty cells by column, as text.
        drop: Whether to drop rows that still have empty cells.

    Raises:
        DataError: There are empty cells left, or a value does not fit its column.
    """
    for name, value in fill.items():
        if name not in table.column_names:
            raise DataError(f"--fill: expected one of {table.column_names}, got {name!r}")
        place = table.column_names.index(name)
        column = _filled(table[name], name, value)
        table = table.set_column(place, name, column)
    if drop:
        return table.drop_null()
    gaps = {name: table[name].null_count for name in table.column_names if table[name].null_count}
    if empty := [name for name, count in gaps.items() if count == len(table)]:
        raise DataError(f"{file}: column {empty[0]!r} is empty in all rows; remove it")
    if gaps:
        raise DataError(f"{file}: empty cells in {_places(table, gaps, file)}: {_suggestion(gaps)}")
    return table


def _filled(column: Any, name: str, value: str) -> Any:
    import pyarrow as pa

    try:
        return column.fill_null(pa.scalar(value).cast(column.type))
    except pa.ArrowException:
        if pa.types.is_null(column.type):
            raise DataError(f"column {name!r} is empty in all rows; remove it") from None
        raise DataError(
            f"--fill: expected a value of type {column.type} for column {name!r}, got {value!r}"
        ) from None


def _places(table: Any, gaps: Mapping[str, int], file: AnyPath) -> str:
    """Describes the location of empty cells, with rows counted from 1."""
    import pyarrow.compute as pc

    below = "" if file.suffix == ".parquet" else " below the header"
    places = []
    for name, count in list(gaps.items())[:_NUM_NAMED]:
        first = pc.index(pc.is_null(table[name]), True).as_py() + 1
        others = f" and {count - 1} more" if count > 1 else ""
        places.append(f"column {name!r}, row {first}{below}{others}")
    return "; ".join(places) + ("; and other columns" if len(gaps) > _NUM_NAMED else "")


def _suggestion(gaps: Mapping[str, int]) -> str:
    column = next(iter(gaps))
    return f"fill them (--fill {column}=VALUE) or drop their rows (--drop-gaps)"
