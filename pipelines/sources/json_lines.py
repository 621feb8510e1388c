"""JSON Lines: one object per line, or one array of objects, as an Arrow table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from pipelines.errors import DataError
from pipelines.sources.arrow import pa
from pipelines.sources.encodings import Encoding, decoding_error, encoding_of, open_text
from pipelines.sources.source import Options
from pipelines.storage import AnyPath

SUFFIXES = (".jsonl", ".ndjson")
#: The suffix of files that are tables only if the user names them, or nothing else can be packed.
JSON = ".json"
_ROWS_AT_ONCE = 1 << 14


def read(file: AnyPath, options: Options) -> tuple[Any, Encoding, frozenset[str]]:
    """Returns the objects of a file as an Arrow table, its encoding, and fields of several types.

    Fields that an object lacks are null. A field of numbers and texts, or of integers of more than
    64 bits, becomes text.

    Raises:
        DataError: A line is not an object, or a field has values that one column cannot have.
    """
    encoding = encoding_of(file, options.encoding)
    tables, mixed = [], set[str]()
    try:
        with open_text(file, encoding) as opened:
            rows = _objects(opened, file)
            while chunk := list(itertools.islice(rows, _ROWS_AT_ONCE)):
                names = dict.fromkeys(name for _, row in chunk for name in row)
                columns = {}
                for name in names:
                    cells = [(line, row.get(name)) for line, row in chunk]
                    columns[name] = _column(cells, file, name, mixed)
                tables.append(pa.table(columns))
    except UnicodeError as error:
        raise decoding_error(file, error) from None
    table = _concatenated(tables, file)
    only = table.to_pylist()[0] if len(table) == 1 else {}
    if only and all(
        isinstance(v, dict) and [*v] == [*map(str, range(len(v)))] for v in only.values()
    ):
        raise DataError(
            f"{file}: is a table by columns, as pandas writes it by default; write it with "
            'to_json(orient="records", lines=True)'
        )
    if lists := [
        n for n, v in only.items() if isinstance(v, list) and v and isinstance(v[0], dict)
    ]:
        raise DataError(
            f"{file}: is one object, whose rows are in its field {lists[0]!r}; write one object "
            f"per line, as jq -c '.[\"{lists[0]}\"][]' does"
        )
    texts = {field.name for field in table.schema if pa.types.is_string(field.type)}
    mixed |= {f.name for t in tables for f in t.schema if not pa.types.is_null(f.type)
              and not pa.types.is_string(f.type)}  # fmt: skip
    return table, encoding, frozenset(mixed & texts)


def _objects(lines: Iterable[str], file: AnyPath) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if number == 1 and line.lstrip().startswith("["):  # one array
            values = _parsed("".join(itertools.chain([line], lines)), file, number)
        else:
            values = [_parsed(line.rstrip(), file, number)]
        for value in values:
            if not isinstance(value, dict):
                raise DataError(
                    f"{file}: line {number}: expected a JSON object such as "
                    f'{{"text": "...", "label": 1}}, got {type(value).__name__}'
                )
            yield number, value


def _parsed(text: str, file: AnyPath, number: int) -> Any:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{file}: line {number} has several fields {repeated!r}; keep one")
        return value

    try:
        return json.loads(text, object_pairs_hook=distinct)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}: line {number + error.lineno - 1}, column {error.colno}: not JSON: {error.msg}"
        ) from None


def _column(values: list[tuple[int, Any]], file: AnyPath, name: str, mixed: set[str]) -> Any:
    """Returns the values of a field as an Arrow array; of several types, as text."""
    cells = [value for _, value in values]
    try:
        return pa.array(cells)
    except UnicodeEncodeError as error:
        line = next(
            line for line, cell in values if error.object in json.dumps(cell, ensure_ascii=False)
        )
        raise DataError(
            f"{file}: line {line}: field {name!r} has half of a surrogate pair, "
            "which is no character; remove it"
        ) from None
    except (pa.ArrowException, OverflowError):
        pass
    for line, cell in values:
        if not isinstance(cell, (str, int, float, bool, type(None))):
            raise DataError(
                f"{file}: line {line}: field {name!r} has {type(cell).__name__}, which the values "
                "of other lines do not match; use the same type in all lines"
            )
    mixed.add(name)
    return pa.array([cell if isinstance(cell, str | None) else json.dumps(cell) for cell in cells])


def _concatenated(tables: list[Any], file: AnyPath) -> Any:
    """Returns one table; a column of numbers in one part and text in another becomes text."""
    if not tables:
        raise DataError(f"{file}: expected one JSON object per line, found none")
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        pass
    fields = [field for table in tables for field in table.schema]
    texts = {field.name for field in fields if pa.types.is_string(field.type)}
    texts -= {field.name for field in fields if pa.types.is_nested(field.type)}
    schemas = [
        pa.schema([f.with_type(pa.string()) if f.name in texts else f for f in table.schema])
        for table in tables
    ]
    try:
        cast = [table.cast(schema) for table, schema in zip(tables, schemas, strict=True)]
        return pa.concat_tables(cast, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(f"{file}: a field has other types in later lines: {error}") from None
