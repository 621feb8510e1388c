"""Tables: CSV, TSV, JSON Lines, Parquet or Arrow, one file or a folder of files of equal columns.

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

import numpy as np

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format.feature import Feature, image_format
from pipelines.sources import images, table_files, types
from pipelines.sources.arrow import pa, pc
from pipelines.sources.source import (
    Example,
    Options,
    Source,
    files_below,
    fingerprint,
    has_files,
    has_suffix,
    is_folder,
    other_splits,
    report_alike,
)
from pipelines.storage import AnyPath, RemotePath

OPTIONS = frozenset({"label", "fill", "drop_gaps"}) | table_files.OPTIONS | images.CODING_OPTIONS
SUFFIXES = table_files.SUFFIXES
_ROWS_AT_ONCE, _NUM_NAMED = 1000, 3
#: Stored NumPy dtypes by Arrow's type names, where they differ.
_DTYPES = {
    **{"halffloat": "float16", "float": "float32", "double": "float64", "uint32": "int64"},
    "binary": "string",
}
_STORED = {"bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", *_DTYPES}


def fits(location: str) -> bool:
    """Returns whether the location is a table or a folder of tables."""
    is_named = has_suffix(storage.at(location), table_files.FALLBACK_SUFFIXES)
    return is_named or has_files(location, SUFFIXES)


class Table(Source):
    """Rows of a table as examples, with its columns as features."""

    def __init__(self, files: Sequence[AnyPath], root: AnyPath, options: Options) -> None:
        self._files = self.files = list(files)
        self._root, self._options = root, options
        if wrong := [words for words in options.fill if "=" not in words]:
            raise DataError(f"--fill: expected COLUMN=VALUE, got {wrong[0]!r}")
        self._fill = dict(words.split("=", 1) for words in options.fill)
        self._label = label = options.label
        if len(self) == 0:  # an empty CSV file has no column types
            raise DataError(f"{files[0]}: expected rows, found none")
        self._classes = self._class_names(label) if label else ()
        self._names = _class_names(files[0])
        fields = [f.name for f in table_files.schema(files[0]) if table_files.is_image(f)]
        self._images = {name: _coding(self._table[name], options) for name in fields}
        self.features = tuple(self._feature(field) for field in self._table.schema)
        if not self._images and any(name in options.given() for name in images.CODING_OPTIONS):
            raise DataError(f"{files[0]}: has no images, to which the image options apply")
        folder = root if isinstance(root, RemotePath) else files[0].parent
        mark = fingerprint(files, folder, contents=True)
        self.description = f"table, {len(self)} rows {mark}" + (f", {label}" if label else "")
        self.description += "".join(
            f", {name}: {coding.description}" for name, coding in self._images.items()
        )
        self.description += f", gaps filled: {self._fill}" if self._fill else ""
        given = options.model_dump(include=set(table_files.OPTIONS), exclude_defaults=True)
        self.description += f", read as {given}" if given else ""
        self.readings = tuple(self._rows.readings)
        types.report(self.readings, self.account)
        self._rows.report(self.account, without=self._dropped)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        numbers_of = {name: i for i, name in enumerate(self._classes)}
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            chunk = [*numbers[start : start + _ROWS_AT_ONCE]]
            for number, row in zip(chunk, self._table.take(chunk).to_pylist(), strict=True):
                if self._label:
                    row[self._label] = numbers_of[row[self._label]]
                for name, coding in self._images.items():
                    place = self._rows.locate(int(self._kept[number]))
                    row[name] = coding.encode(row[name], f"{place}: {name}")
                yield row

    def _class_names(self, label: str) -> tuple[str, ...]:
        """Returns the classes of all splits, so that a number means the same class in all."""
        names = _classes(self._table, label)
        for root, files in other_splits(self._root, SUFFIXES):
            table = table_files.read(files, root, self._options).table
            if label in table.column_names:  # else it is a test split without labels
                absent = {n for n in _classes(table, label) if n} - names
                change = "have examples in other splits only"
                self.account.change("classes", change, *sorted(absent))
                names |= absent
        report_alike(names, self.account)
        return tuple(sorted(names))

    @functools.cached_property
    def _rows(self) -> table_files.Rows:
        return table_files.read(self._files, self._root, self._options)

    @functools.cached_property
    def _filled(self) -> Any:
        """The table, in which some columns may still have empty cells.

        Cells of delimited text are texts, unless the user says what to do with empty ones.
        """
        table = self._rows.table
        if unknown := [name for name in self._fill if name not in table.column_names]:
            raise DataError(f"--fill: expected one of {table.column_names}, got {unknown[0]!r}")
        for index, name in enumerate(table.column_names):
            column, is_filled = table[name], name in self._fill
            if name in self._rows.cells and str(column.type) == "string":
                if is_filled or self._options.drop_gaps:
                    column = pc.if_else(types.with_gaps(column).is_null(), None, column)
                elif name == self._label:
                    column = pc.if_else(pc.equal(column, ""), None, column)
            column = _with_value(column, name, self._fill[name]) if is_filled else column
            table = table.set_column(index, name, column)
        _check_values(table, self._files[0])
        _check_lists(table, self._rows)
        return table

    @functools.cached_property
    def _dropped(self) -> np.ndarray:
        """Numbers of the rows that are dropped, in their order."""
        if not self._options.drop_gaps:
            return np.empty(0, np.int64)
        gaps = [column.is_null().to_numpy() for column in self._filled.columns]
        return np.flatnonzero(np.any(gaps, axis=0))

    @functools.cached_property
    def _kept(self) -> np.ndarray:
        return np.delete(np.arange(len(self._filled)), self._dropped)

    @functools.cached_property
    def _table(self) -> Any:
        if not self._options.drop_gaps:
            _check_gaps(self._filled, self._rows)
        elif len(self._filled) == len(self._dropped) > 0:
            raise DataError(f"{self._files[0]}: each row has an empty cell; use --fill for some")
        return self._filled.take(self._kept) if len(self._dropped) else self._filled

    def _feature(self, field: Any) -> Feature:
        if field.name == self._label:
            return Feature(
                name=field.name, dtype="int64", encoding="list", label_names=self._classes
            )
        if field.name in self._images:
            return self._images[field.name].feature(field.name)
        if names := self._names.get(field.name):
            return Feature(name=field.name, dtype="int64", encoding="list", label_names=names)
        shape, element = list[int | None](), field.type
        while types.is_list(element):
            shape.append(getattr(element, "list_size", None))
            element = element.value_type
        kind = str(element)
        dtype = _DTYPES.get(kind, kind)
        # A list cannot store float64; raw bytes can, but require a known length.
        encoding = {"string": "bytes", "float64": "raw"}.get(dtype, "list")
        fixed = shape if encoding == "raw" else shape[1:]
        if kind not in _STORED or None in fixed or 0 in fixed:
            raise DataError(
                f"{self._files[0]}: column {field.name!r}: cannot store {field.type}; convert it "
                f"to numbers, text or binary (lists of float64: --column {field.name}=float32), or "
                f"use --column {field.name}=ignore"
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
    if files := files_below(path, table_files.suffixes_in(path)):
        return Table(files, path, options)
    raise DataError(f"{location}: expected {table_files.EXPECTED} files, found none")


def _class_names(file: AnyPath) -> dict[str, tuple[str, ...]]:
    """Returns the names of classes by column, from the metadata that `datasets` writes."""
    try:
        metadata = table_files.schema(file).metadata[b"huggingface"]
        features = json.loads(metadata)["info"]["features"]
        return {
            name: tuple(feature["names"])
            for name, feature in features.items()
            if isinstance(feature, Mapping) and "names" in feature  # a ClassLabel
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _coding(column: Any, options: Options) -> images.ImageCoding:
    names = []
    for number, value in enumerate(column):
        data = bytes(value.as_buffer()[:8])
        names.append(Path(f"{number}.{image_format(data) or 'other'}"))

    def open_image(path: Path) -> BinaryIO:
        return io.BytesIO(column[int(path.stem)].as_py())

    return images.coding_for(names, options, open_image)


def _classes(table: Any, label: str) -> set[str]:
    if label not in table.column_names:
        raise DataError(f"--label: expected one of {table.column_names}, got {label!r}")
    kind = str(table.schema.field(label).type)
    if kind != "string":
        raise DataError(
            f"--label: column {label!r} contains {kind}, not class names; pack it without --label"
        )
    return set(table[label].unique().to_pylist())


def _check_gaps(table: Any, rows: table_files.Rows) -> None:
    gaps = {name: table[name].null_count for name in table.column_names if table[name].null_count}
    if not gaps:
        return
    first = {name: _first_gap(table[name]) for name in gaps}
    file = rows.file_of(min(first.values()))
    names, places = sorted(gaps, key=lambda name: rows.file_of(first[name]) != file), []
    for name in names[:_NUM_NAMED]:
        others = f" and {gaps[name] - 1} more" if gaps[name] > 1 else ""
        where = rows.locate(first[name])
        places.append(f"column {name!r}, {where.removeprefix(f'{file}: ')}{others}")
    places += ["and other columns"] if len(gaps) > _NUM_NAMED else []
    raise DataError(
        f"{file}: empty cells in {'; '.join(places)}: fill them (--fill {names[0]}=VALUE) or drop "
        "their rows (--drop-gaps)"
    )


def _check_values(table: Any, file: AnyPath) -> None:
    names = [n for n in table.column_names if table[n].null_count == len(table) > 0]
    if names:
        what = f"column {names[0]!r} is" if len(names) == 1 else f"columns {names} are"
        ignore = " ".join(f"--column {name}=ignore" for name in names)
        raise DataError(f"{file}: {what} empty in all rows; remove, or use {ignore}")


def _check_lists(table: Any, rows: table_files.Rows) -> None:
    for name in [field.name for field in table.schema if types.is_list(field.type)]:
        values, row_of = table[name].combine_chunks(), None
        while types.is_list(values.type):
            parents = pc.list_parent_indices(values)
            row_of = parents if row_of is None else row_of.take(parents)
            values = pc.list_flatten(values)
            if (gap := _first_gap(values)) >= 0:
                raise DataError(
                    f"{rows.locate(row_of[gap].as_py())}: column {name!r} has a list with an empty "
                    f"element; correct it, or use --column {name}=ignore"
                )


def _first_gap(column: Any) -> int:
    return int(pc.index(pc.is_null(column), True).as_py())


def _with_value(column: Any, name: str, value: str) -> Any:
    try:
        return column.fill_null(pa.scalar(value).cast(column.type))
    except pa.ArrowException:
        if pa.types.is_null(column.type):
            return column  # a column without any value is an error in any case
        raise DataError(
            f"--fill: expected a value of type {column.type} for column {name!r}, got {value!r}"
        ) from None
