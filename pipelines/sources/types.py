"""What each column of a table is read as, and why.

Cells of delimited text have no types: a column is read as numbers only if all of its cells are,
over all files. Columns of Parquet, Arrow and JSON keep their types, except for those that no record
can store. `--column NAME=TYPE` overrules both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pipelines.errors import DataError
from pipelines.sources.account import Account
from pipelines.sources.arrow import pa, pc

#: Cells of delimited text that mean "no value", as for pandas.
_MISSING = {
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "NaT", "None", "n/a", "nan", "null"),
}
#: The same, only among numbers.
_MISSING_NUMBERS = _MISSING | {
    *("?", "-", "--", ".", "none", "missing", "n.a.", "N.A.", "NAN", "Null"),
    *("#DIV/0!", "#NAME?", "#NUM!", "#REF!", "#VALUE!"),  # errors of Excel
}
_NUM_NAMED = 6
_MOST = 0.5  # a column with more numbers may be one of numbers
_UNITS_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_ZONE = r"[0-9]:[0-9]{2}(\.[0-9]+)?(Z|[-+][0-9]{2}:?[0-9]{2})$"
_NANOSECONDS = r"(\.[0-9]{6})[0-9]+"
#: What is around all numbers of a column, by its name.
_SIGNS = [("percent", r"\s*%$"), *(("currency", rf"^[{c}]\s*|\s*[{c}]$") for c in "$€£¥")]
#: White space, and marks without width that programs leave before and after cells.
_SPACES = "".join(filter(str.isspace, map(chr, range(0x3001)))) + "\u200b\u2060\ufeff"
_OTHER_DATE = r"^[0-9]{1,4}[./-][0-9]{1,2}[./-][0-9]{1,4}(T|\b)"
_HEAD = 200  # cells that decide which forms are tried on a whole column

_DIGITS = r"[0-9]+"
_EXPONENT = r"([eE][-+]?[0-9]+)?"
_INTEGER = rf"^[-+]?{_DIGITS}$"
_OVER_15_DIGITS = r"^[-+]?[0-9]{16,}$"
_CODE = r"^[-+]?0[0-9]"  # 00123: an integer would lose the zeros
_FLOAT = rf"^[-+]?(({_DIGITS}\.?[0-9]*|\.{_DIGITS}){_EXPONENT}|(?i:inf(inity)?))$"
_COMMA_THOUSANDS = r"^[-+]?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)(\.[0-9]*)?$"
_SPACE_THOUSANDS = r"^[-+]?([0-9]{1,3}([ '\x{00a0}\x{202f}\x{2019}][0-9]{3})+|[0-9]+)([.,][0-9]*)?$"
_POINT_THOUSANDS = r"^[-+]?[1-9][0-9]{0,2}\.[0-9]{3}$"
_DECIMAL_COMMA = r"^[-+]?([0-9]{1,3}(\.[0-9]{3})+|[0-9]+)(,[0-9]+)?" + _EXPONENT + "$"


class _Form(NamedTuple):
    """A way to write numbers: a pattern, and what to replace before they are parsed."""

    why: str
    pattern: str
    replace: tuple[tuple[str, str], ...] = ()
    is_guess: bool = True


_PLAIN = _Form("", _FLOAT, (), False)
_POINT = _Form("numbers with thousands separators", _COMMA_THOUSANDS, ((",", ""),))
_SPACE = _Form(
    "numbers with thousands separators", _SPACE_THOUSANDS, (("[^-+0-9.,]", ""), (",", "."))
)
_COMMA = _Form("numbers with decimal commas", _DECIMAL_COMMA, ((r"\.", ""), (",", ".")))

#: Types that `--column NAME=TYPE` accepts, with their names in Arrow.
_ARROW_TYPES = {
    "integer": "int64",
    "number": "float64",
    **{name: name for name in ("int64", "int32", "float32", "float64")},
    "decimal-comma": "float64",
    "boolean": "bool",
    "text": "string",
}
TYPES = (*_ARROW_TYPES, "date", "date:FORMAT", "ignore")
_TRUE, _FALSE = ["true", "t", "yes", "y", "1"], ["false", "f", "no", "n", "0"]


class Reading(NamedTuple):
    """What a column is read as.

    Attributes:
        name: Name of the column.
        kind: `integer`, `number`, `boolean`, `date`, `text`, `list`, `image` or `left out`.
        why: The reason, for the user.
        is_guess: Whether the column could mean something else, so that `--strict` refuses it.
    """

    name: str
    kind: str
    why: str
    is_guess: bool = False


def parse(given: Sequence[str]) -> dict[str, str]:
    """Parses `NAME=TYPE` texts to types by column.

    Raises:
        DataError: A text has an invalid format, or there is no such type.
    """
    types = {}
    for words in given:
        name, equals, kind = words.rpartition("=")
        if not equals or (kind not in TYPES and not kind.startswith("date:")):
            raise DataError(
                f"--column: expected NAME=TYPE with a type of {', '.join(TYPES)}, got {words!r}"
            )
        types[name] = kind
    return types


def described(readings: Sequence[Reading]) -> str:
    """Returns lines with the columns, what they were read as, and why."""
    names: dict[Reading, list[str]] = {}
    for reading in readings:
        names.setdefault(reading._replace(name=""), []).append(reading.name)
    rows = [("column", "read as", "why")]
    for reading, columns in names.items():
        why = reading.why + (" (a guess)" if reading.is_guess else "")
        others = len(columns) - _NUM_NAMED
        shown = ", ".join(columns[:_NUM_NAMED]) + (f" and {others} more" if others > 0 else "")
        rows.append((shown, reading.kind, why))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows)


def report(readings: Sequence[Reading], account: Account) -> None:
    """Adds columns to an account."""
    used = [reading for reading in readings if reading.kind != "left out"]
    account.use("columns", len(used))
    for reading in readings:
        if reading.kind == "left out":
            account.leave_out("columns", reading.why, reading.name)
        else:
            change = f"read as {reading.kind}, {reading.why}"
            account.change("columns", change, reading.name, guessed=reading.is_guess)


def read_columns(
    table: Any,
    cells: Collection[str],
    given: Mapping[str, str],
    locate: Callable[[int], str],
    *,
    decimal_comma: bool = False,
) -> tuple[Any, list[Reading]]:
    """Returns a table whose columns have the types of what they contain.

    Args:
        table: An Arrow table.
        cells: Names of the columns of text whose types are not known.
        given: Types by column, which the user chose.
        locate: Returns the file and row of a row of the table, for error messages.
        decimal_comma: Whether `1,234` rather means a fraction than thousands.

    Raises:
        DataError: There is no such column, or a cell does not have the chosen type.
    """
    if unknown := [name for name in given if name not in table.column_names]:
        raise DataError(
            f"--column: expected one of {', '.join(table.column_names)}, got {unknown[0]!r}"
        )
    readings, columns = [], {}
    for name in table.column_names:
        column = table[name]
        if kind := given.get(name):
            column, reading = _given(column, name, kind, locate)
        elif name in cells:
            column, reading = _cells(column, name, decimal_comma, locate)
        else:
            column, reading = _declared(column, name)
        readings.append(reading)
        if reading.kind != "left out":
            columns[name] = column
    return pa.table(columns), readings


def is_list(kind: Any) -> bool:
    """Returns whether an Arrow type is one of lists, also of a fixed length."""
    return pa.types.is_nested(kind) and hasattr(kind, "value_type")


def is_number(text: str) -> bool:
    """Returns whether a text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def are_numbers(column: Any) -> Any:
    """Returns whether each cell of a column of text is a number, null if it has no value."""
    return pc.match_substring_regex(_without(column, _MISSING_NUMBERS), _FLOAT)


def are_integers(column: Any) -> bool:
    """Returns whether all cells of a column of text are integers."""
    return column.null_count == 0 and _all(column, _INTEGER)


def days(column: Any) -> Any:
    """Returns ISO dates or times as days since 1970-01-01 UTC, an Arrow column of float64."""
    zone = "UTC" if _any(column, _ZONE) else None
    column = pc.replace_substring_regex(column, _NANOSECONDS, r"\1")
    seconds = column.cast(pa.timestamp("us", zone)).cast(pa.int64()).cast(pa.float64(), safe=False)
    return pc.divide(seconds, 86_400e6)


def _given(column: Any, name: str, kind: str, locate: Callable[[int], str]) -> tuple[Any, Reading]:
    reading = Reading(name, kind.partition(":")[0], "--column")
    if kind == "ignore":
        return None, reading._replace(kind="left out")
    is_text = pa.types.is_string(column.type)
    missing = _MISSING if kind in ("date", "boolean") else _MISSING_NUMBERS

    def converted(column: Any) -> Any:
        if kind.startswith("date"):
            return _iso_dates(_without(column, missing) if is_text else column, kind[5:])
        kind_of_value = getattr(pa, kind_in_arrow)()
        if is_list(column.type):
            column = _lists(column)
            return column.cast(_list_of(column.type, kind_of_value))
        if not is_text or kind == "text":
            return column.cast(kind_of_value)
        values = _without(column, missing)
        if kind == "boolean":
            lower = pc.utf8_lower(values)
            is_true = pc.is_in(lower, pa.array(_TRUE))
            is_known = pc.or_(is_true, pc.is_in(lower, pa.array(_FALSE)))
            if not pc.all(pc.or_(is_known, pc.is_null(values))).as_py():
                raise pa.ArrowInvalid("not a boolean")
            return pc.if_else(pc.is_null(values), None, is_true)
        form = _COMMA if kind == "decimal-comma" else _PLAIN
        return _replaced(pc.replace_substring(values, "%", ""), form.replace).cast(kind_of_value)

    kind_in_arrow = {"bool": "bool_"}.get(k := _ARROW_TYPES.get(kind, ""), k)
    try:
        return converted(column), reading
    except pa.ArrowException:
        row = _first_failure(column, converted)
        raise DataError(
            f"{locate(row)}: column {name!r}: expected {kind} (--column {name}={kind}), got "
            f"{str(column[row].as_py())[:60]!r}"
        ) from None


def _cells(
    column: Any, name: str, decimal_comma: bool, locate: Callable[[int], str]
) -> tuple[Any, Reading]:
    """Returns a column of delimited text as numbers, booleans, dates or unchanged text."""
    values, numbers = with_gaps(column), _without(column, _MISSING_NUMBERS)
    if values.null_count == len(values):
        return pa.chunked_array([pa.nulls(len(values))]), Reading(name, "empty", "has no value")
    numbers = pc.replace_substring(numbers, "\u2212", "-")  # the minus of typesetters
    suffix, head = "", numbers.drop_null()[:_HEAD]
    for what, pattern in _SIGNS:
        if len(head) and _all(head, pattern):
            suffix = f", {what} signs removed"
            numbers = pc.replace_substring_regex(numbers, pattern, "")
            head = numbers.drop_null()[:_HEAD]
    forms = [_PLAIN, *([_COMMA, _POINT] if decimal_comma else [_POINT, _COMMA]), _SPACE]
    for form in forms if len(head) else ():
        if _all(head, form.pattern) and _all(numbers, form.pattern):
            result, reading = _parsed(numbers, name, form, suffix, decimal_comma=decimal_comma)
            if reading.kind == "text":
                break
            return result, reading._replace(why=reading.why + _gaps_note(column, result))
    else:
        reading = Reading(name, "text", _why_text(column, numbers, locate))
        lower = pc.utf8_lower(values)
        if pc.all(pc.is_in(lower.drop_null(), pa.array(["true", "false"]))).as_py():
            result = pc.if_else(pc.is_null(values), None, pc.equal(lower, "true"))
            return result, Reading(name, "boolean", "all cells are true or false")
        if _are_dates(values[:_HEAD]) and _are_dates(values):
            return values, Reading(name, "date", "all cells are ISO 8601, stored as text")
        if _all(values, _OTHER_DATE):
            why = f"dates in another form than ISO 8601 (--column {name}=date:%d.%m.%Y)"
            reading = Reading(name, "text", why, is_guess=True)
    return column.fill_null(""), reading._replace(why=reading.why + _gaps_note(column, values))


def _why_text(column: Any, numbers: Any, locate: Callable[[int], str]) -> str:
    """Returns why a column is not one of numbers, and where, if most of its cells are."""
    is_number = pc.match_substring_regex(numbers, _FLOAT)
    if (pc.mean(is_number.slice(0, _HEAD)).as_py() or 0) <= _MOST:
        return "no numbers, dates or booleans"
    row = pc.index(is_number, False).as_py()
    return f"{locate(row)} has {column[row].as_py()[:40]!r} among numbers"


def _parsed(
    numbers: Any, name: str, form: _Form, suffix: str, *, decimal_comma: bool
) -> tuple[Any, Reading]:
    plain = _replaced(numbers, form.replace)
    why = (form.why or "all cells are numbers") + suffix
    is_guess = form.is_guess or bool(suffix)
    if not _all(plain, _INTEGER):
        large = plain.filter(pc.match_substring_regex(plain, _OVER_15_DIGITS))
        if any(int(float(cell)) != int(cell) for cell in large.to_pylist()):
            why = "integers of more than 53 bits among fractions"
            return numbers, Reading(name, "text", why, is_guess=True)
        if decimal_comma and form is _PLAIN and _all(plain, _POINT_THOUSANDS):
            why, is_guess = f"{why}, or thousands have points", True
        return plain.cast(pa.float64()), Reading(name, "number", why, is_guess)
    if form is _PLAIN and _any(plain, _CODE):
        return numbers, Reading(name, "text", "digits with leading zeros", is_guess=True)
    try:
        why = why.replace("all cells are numbers", "all cells are integers")
        return plain.cast(pa.int64()), Reading(name, "integer", why, is_guess)
    except pa.ArrowException:
        return numbers, Reading(name, "text", "integers of more than 64 bits", is_guess=True)


def _declared(column: Any, name: str) -> tuple[Any, Reading]:
    types, kind = pa.types, column.type
    if types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    why = f"stored as {kind}"
    if types.is_null(kind):
        return column, Reading(name, "empty", "has no value")
    if types.is_temporal(kind):
        if types.is_duration(kind):
            count = column.cast(pa.int64()).cast(pa.float64(), safe=False)
            seconds = pc.divide(count, _UNITS_PER_SECOND[kind.unit])
            return seconds, Reading(name, "number", f"{why}, in seconds")
        is_date = types.is_date(kind) or types.is_timestamp(kind)
        return column.cast(pa.string()), Reading(name, "date" if is_date else "text", why)
    if types.is_decimal(kind):
        try:
            if kind.scale == 0:
                return column.cast(pa.int64()), Reading(name, "integer", why)
        except pa.ArrowException:
            return column.cast(pa.string()), Reading(name, "text", f"{why}, over 64 bits")
        return column.cast(pa.float64()), Reading(name, "number", f"{why}, to the nearest float64")
    if str(kind) == "uint64":
        try:
            return column.cast(pa.int64()), Reading(name, "integer", why)
        except pa.ArrowException:
            return column.cast(pa.string()), Reading(name, "text", f"{why}, over 63 bits")
    if types.is_large_string(kind) or types.is_string_view(kind):
        column = column.cast(pa.string())
    elif types.is_large_binary(kind) or types.is_binary_view(kind):
        column = column.cast(pa.binary())
    elif is_list(kind):
        column = _lists(column)
    return column, Reading(name, _kind(column.type), why + _special_values(column))


def _lists(column: Any) -> Any:
    """Returns lists of what a record can store: lists without values as those of integers.

    Lists have a fixed length if a record needs it: those of float64, and those inside of lists.
    """
    kind = column.type.value_type
    if pa.types.is_null(kind):
        return column.cast(_list_of(column.type, pa.int64()))  # any type reads them
    if pa.types.is_fixed_size_list(column.type):
        return column
    if is_list(kind):
        size = _only_length(pc.list_flatten(column))
        return column if size is None else column.cast(pa.list_(_list_of(kind, size=size)))
    stored = _declared(pa.chunked_array([pa.array([], kind)]), "")[0].type
    with contextlib.suppress(pa.ArrowException):  # else `pack` names the type
        column = column.cast(pa.list_(stored))
    size = _only_length(column) if pa.types.is_float64(stored) else None
    return column if size is None else column.cast(_list_of(column.type, size=size))


def _list_of(kind: Any, element: Any = None, size: int | None = None) -> Any:
    """Returns a type of lists with another innermost type, or another length."""
    value = kind.value_type
    if is_list(value):
        value = _list_of(value, element)
    elif element is not None:
        value = element
    return pa.list_(value, getattr(kind, "list_size", -1) if size is None else size)


def _only_length(lists: Any) -> int | None:
    lengths = pc.unique(pc.list_value_length(lists)).to_pylist()
    return lengths[0] if len(lengths) == 1 else None


def _kind(kind: Any) -> str:
    types = pa.types
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind):
        return "integer"
    if types.is_floating(kind):
        return "number"
    return "list" if types.is_nested(kind) else "text"


def _special_values(column: Any) -> str:
    if not pa.types.is_floating(column.type):
        return ""
    counts = {
        "NaN": pc.sum(pc.is_nan(column)).as_py(),
        "infinite": pc.sum(pc.is_inf(column)).as_py(),
    }
    return "".join(f", {count} {name}" for name, count in counts.items() if count)


def _gaps_note(column: Any, result: Any) -> str:
    """Counts empty cells, and names words that mean no value."""
    spelled = pc.and_(pc.is_null(result), pc.is_valid(column))
    note = f", {column.null_count} empty cells" if column.null_count else ""
    if count := pc.sum(spelled).as_py():
        words = ", ".join(map(repr, pc.unique(column.filter(spelled)).to_pylist()[:3]))
        note += f", {count} without a value: {words}"
    return note + _special_values(result)


def with_gaps(column: Any) -> Any:
    """Returns the trimmed cells of text, with null for those that mean no value, such as NA."""
    return _without(column, _MISSING)


def _without(column: Any, missing: Collection[str]) -> Any:
    trimmed = pc.utf8_trim(column, _SPACES)
    return pc.if_else(pc.is_in(trimmed, pa.array(sorted(missing))), None, trimmed)


def _replaced(values: Any, replace: Sequence[tuple[str, str]]) -> Any:
    for pattern, by in (("^\\+", ""), *replace):
        values = pc.replace_substring_regex(values, pattern, by)
    return values


def _are_dates(values: Any) -> bool:
    try:
        _iso_dates(values)
    except pa.ArrowException:
        return False
    return True


def _iso_dates(values: Any, form: str = "") -> Any:
    """Returns dates as ISO 8601 text. Raises Arrow's error if one is not of this form."""
    if not form:
        if pa.types.is_string(values.type):  # all cells have a time zone, or none has one
            values.cast(pa.timestamp("us", "UTC" if _any(values, _ZONE) else None))
        return values.cast(pa.string())
    parsed = pc.strptime(values, form, "s")
    has_time = any(letter in form for letter in ("%H", "%I", "%T"))
    return (parsed if has_time else parsed.cast(pa.date32())).cast(pa.string())


def _all(values: Any, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(values, pattern), skip_nulls=True).as_py())


def _any(values: Any, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(values, pattern), skip_nulls=True).as_py())


def _first_failure(column: Any, convert: Callable[[Any], Any]) -> int:
    low, high = 0, len(column)  # the first failure is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(column[low:middle])
        except pa.ArrowException:
            high = middle
        else:
            low = middle
    return low
