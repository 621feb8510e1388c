"""Cells of a table without a value: the user says what becomes of them, nobody guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import DataError

_NUM_NAMED = 3


def parse_fill(given: Sequence[str]) -> dict[str, str]:
    """From `COLUMN=VALUE` to values by column.

    Raises:
        DataError: one is of another form.
    """
    if wrong := [words for words in given if "=" not in words]:
        raise DataError(f"--fill: expected COLUMN=VALUE, got {wrong[0]!r}")
    return {column: value for column, _, value in (words.partition("=") for words in given)}


def close(table: Any, file: Path, fill: Mapping[str, str], drop: bool) -> Any:
    """A table without gaps.

    Args:
        table: of Arrow, one file's.
        file: for errors.
        fill: what stands in the gaps of a column, as text.
        drop: whether rows that still have gaps are left out.

    Raises:
        DataError: there are gaps, or a value is none of its column.
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
        raise DataError(f"{file}: column {empty[0]!r} has no value in any row; leave it out")
    if gaps:
        raise DataError(f"{file}: no value in {_places(table, gaps, file)}: {_cure(gaps)}")
    return table


def _filled(column: Any, name: str, value: str) -> Any:
    import pyarrow as pa

    try:
        return column.fill_null(pa.scalar(value).cast(column.type))
    except pa.ArrowException:
        if pa.types.is_null(column.type):
            raise DataError(f"column {name!r} has no value in any row; leave it out") from None
        raise DataError(
            f"--fill: expected {column.type}, as column {name!r} holds, got {value!r}"
        ) from None


def _places(table: Any, gaps: Mapping[str, int], file: Path) -> str:
    """Where the gaps are, with rows counted from 1 as people do."""
    import pyarrow.compute as pc

    below = "" if file.suffix == ".parquet" else " below the header"
    places = []
    for name, count in list(gaps.items())[:_NUM_NAMED]:
        first = pc.index(pc.is_null(table[name]), True).as_py() + 1
        others = f" and {count - 1} more" if count > 1 else ""
        places.append(f"column {name!r}, row {first}{below}{others}")
    return "; ".join(places) + ("; and other columns" if len(gaps) > _NUM_NAMED else "")


def _cure(gaps: Mapping[str, int]) -> str:
    column = next(iter(gaps))
    return f"say what stands there (--fill {column}=VALUE) or leave such rows out (--drop-gaps)"
