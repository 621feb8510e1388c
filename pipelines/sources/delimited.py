"""Delimited text (CSV, TSV): the encoding, delimiter and quotes of a file, and its cells as text.

Types are decided later (`types.py`), over the cells of all files.
"""

from __future__ import annotations

import csv
import functools
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipelines.errors import DataError
from pipelines.sources.arrow import csv as arrow_csv
from pipelines.sources.arrow import pa
from pipelines.sources.encodings import Encoding, decoding_error, encoding_of, open_bytes, open_text
from pipelines.sources.source import Options, suffix_of
from pipelines.sources.types import is_number
from pipelines.storage import AnyPath

#: Default delimiters by suffix.
DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
#: `--header` of files whose first row is one of data, and of those where it has the names.
NONE, FIRST = "none", "first"
_OTHERS = ",;\t|"
_SAMPLE_LINES, _SAMPLE_CHARACTERS = 1000, 1 << 16
_SNIFFED_CHARACTERS = 1 << 13  # the patterns of csv.Sniffer are slow on long texts
_BLOCK_BYTES = 1 << 24  # also the longest row
_SAMPLE_ROWS = 20
_UNUSUAL = ("::", "^", "~", "\x01", "\x1f")  # MovieLens, SAP, Hive, ...
_QUOTED = re.compile(r' +".*"\s*$', re.DOTALL)
_EXCEL = "sep="  # a first line that names the delimiter


class Dialect(NamedTuple):
    """How a file is divided into cells.

    Attributes:
        encoding: Its encoding.
        delimiter: The character between cells.
        quote: The character around cells, or None.
        note: What was detected, for the user; empty for the usual dialect of the suffix.
        skip: Number of lines before the table.
        names: Names of the columns; None: those in the first row.
    """

    encoding: Encoding
    delimiter: str
    quote: str | None
    note: str = ""
    skip: int = 0
    names: list[str] | None = None


def read(file: AnyPath, options: Options) -> tuple[Any, Dialect]:
    """Returns the cells of a file as an Arrow table of text, empty cells as null.

    Raises:
        DataError: A quote is never closed, a row is longer or shorter than the header, or bytes
            do not belong to the given encoding.
    """
    limit = csv.field_size_limit(sys.maxsize)  # of the characters in a cell
    try:
        dialect = _dialect(file, options)
        if dialect.quote:
            _check_quotes(file, dialect)
    finally:
        csv.field_size_limit(limit)

    def read_by(
        function: Any, *, use_threads: bool = True, parse: Any = None, **options: Any
    ) -> Any:
        opened = open_bytes(file)
        opened.seek(dialect.encoding.start)
        return function(
            opened,
            read_options=arrow_csv.ReadOptions(
                encoding=dialect.encoding.name,
                block_size=_BLOCK_BYTES,
                use_threads=use_threads,
                skip_rows=dialect.skip,
                column_names=dialect.names,
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=dialect.delimiter,
                quote_char=dialect.quote or False,
                newlines_in_values=True,
                **(parse or {}),
            ),
            **options,
        )

    try:
        # PyArrow before 25 has no default type, so that each column of the first block is named.
        with read_by(arrow_csv.open_csv, parse={"invalid_row_handler": lambda _: "skip"}) as reader:
            text = dict.fromkeys(reader.schema.names, pa.string())
        convert = arrow_csv.ConvertOptions(
            column_types=text, strings_can_be_null=True, null_values=[""]
        )
        table = functools.partial(read_by, arrow_csv.read_csv, convert_options=convert)
        try:
            return table(use_threads=True), dialect
        except pa.ArrowException:  # it names the row of an error only if it reads with one thread
            return table(use_threads=False), dialect
    except UnicodeError as error:
        raise decoding_error(file, error) from None
    except pa.ArrowException as error:
        encoding = dialect.encoding
        guess = f" ({encoding.note}, a guess: --encoding)" if encoding.is_guessed else ""
        raise DataError(
            f"{file}: cannot be read as a table: {error}{guess}; remove lines that are no rows, or "
            "choose --delimiter and --quote"
        ) from None


def _dialect(file: AnyPath, options: Options) -> Dialect:
    encoding = encoding_of(file, options.encoding)
    usual = DELIMITERS.get(suffix_of(file), ",")
    quote = None if options.quote == "none" else _character(options.quote or '"', "--quote")
    try:
        with open_text(file, encoding) as opened:
            lines, num_characters = [], 0
            for line in itertools.islice(opened, _SAMPLE_LINES):
                lines.append(line)
                num_characters += len(line)
                if num_characters > _SAMPLE_CHARACTERS:
                    break
    except UnicodeError as error:
        raise decoding_error(file, error) from None
    skip = 0
    if lines and lines[0].lower().startswith(_EXCEL) and len(lines[0].strip()) == len(_EXCEL) + 1:
        usual, skip, lines = lines[0][len(_EXCEL)], 1, lines[1:]
    delimiter = _character(options.delimiter, "--delimiter") if options.delimiter else None
    if not delimiter and not _divides(lines, usual, quote):
        delimiter, quote = _sniffed(lines, usual, quote, bool(options.quote))
    delimiter = delimiter or usual
    _check_cells(file, lines, delimiter, quote)
    note = "" if delimiter == usual and not skip else f"divided by {delimiter!r}"
    note = ", ".join(filter(None, [encoding.note, note]))
    return Dialect(encoding, delimiter, quote, note, skip, _names(lines, delimiter, quote, options))


def _check_cells(file: AnyPath, lines: list[str], delimiter: str, quote: str | None) -> None:
    """Raises `DataError` for a web page, and for cells that something unusual divides."""
    if lines and lines[0].lstrip().lower().startswith(("<!doctype html", "<html")):
        raise DataError(f"{file}: is a web page, not a table; download the file itself")
    words = [line.split() for line in lines[:_SAMPLE_ROWS] if line.strip()]
    numbers = sum(map(is_number, words[-1])) if words else 0
    is_one = delimiter != " " and not any(delimiter in line for line in lines)
    if is_one and len({*map(len, words)}) == 1 and 1 < len(words[-1]) <= 2 * numbers:
        raise DataError(
            f"{file}: spaces seem to divide the cells; pass --delimiter ' ' if it is one each, and "
            "replace several by one first"
        )
    for mark in _UNUSUAL if is_one else ():
        counts = {line.count(mark) for line in lines if line.strip()}
        if len(counts) == 1 and counts != {0}:
            cure = "replace it by a tab first"
            cure = f"pass --delimiter {mark!r} if it does" if len(mark) == 1 else cure
            raise DataError(f"{file}: {mark!r} seems to divide the cells; {cure}")
    rows = _rows(iter(lines[:_SAMPLE_ROWS]), delimiter, quote)
    if quote and any(_QUOTED.match(cell.replace(quote, '"')) for row in rows for cell in row):
        raise DataError(
            f"{file}: has spaces between {delimiter!r} and {quote!r}, which would become part of "
            "the cells; remove them"
        )


def _names(
    lines: list[str], delimiter: str, quote: str | None, options: Options
) -> list[str] | None:
    """Returns the names of the columns of a file without a row of names; None if it has one."""
    if options.header in (None, FIRST):
        return None
    if options.header and options.header != NONE:
        return options.header.split(",")
    width = len(next(filter(None, _rows(iter(lines), delimiter, quote)), ()))
    return [f"column_{number}" for number in range(1, width + 1)]


def _character(given: str, flag: str) -> str:
    character = {"\\t": "\t", "tab": "\t"}.get(given, given)
    if len(character) != 1 or not character.isascii():
        raise DataError(f"{flag}: expected one ASCII character, or 'tab', got {given!r}")
    return character


def _divides(lines: list[str], delimiter: str, quote: str | None) -> bool:
    rows = [row for row in _rows(iter(lines), delimiter, quote) if row]
    # The last lines of the sample may begin a row that continues after it.
    widths = {len(row) for row in rows[:-1] or rows}
    return len(widths) == 1 and widths != {1}


def _rows(lines: Iterator[str], delimiter: str, quote: str | None, **options: Any) -> Any:
    if not quote:
        return csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, **options)
    return csv.reader(lines, delimiter=delimiter, quotechar=quote, **options)


def _sniffed(
    lines: list[str], usual: str, quote: str | None, is_quote_given: bool
) -> tuple[str, str | None]:
    try:
        dialect = csv.Sniffer().sniff("".join(lines)[:_SNIFFED_CHARACTERS], delimiters=_OTHERS)
    except csv.Error:
        return usual, quote
    for candidate in [quote] if is_quote_given else [quote, dialect.quotechar]:
        if _divides(lines, dialect.delimiter, candidate):
            return dialect.delimiter, candidate
    return usual, quote


def _check_quotes(file: AnyPath, dialect: Dialect) -> None:
    """Raises `DataError` for a quote that is never closed, or closed inside of a cell.

    Arrow would read all rows up to the next quote as one cell.
    """
    assert dialect.quote
    begin = 1
    try:
        with open_bytes(file) as binary:
            mark = dialect.quote.encode()
            if not any(mark in block for block in iter(lambda: binary.read(1 << 20), b"")):
                return
        with open_text(file, dialect.encoding) as opened:
            rows = _rows(opened, dialect.delimiter, dialect.quote, strict=True)
            for _ in rows:
                begin = rows.line_num + 1
    except csv.Error as error:
        what = "has text after a closing quote"
        if "end of data" in str(error):
            what = "begins a quoted cell that never ends"
        raise DataError(
            f"{file}: line {begin} {what}; correct it (a quote inside of quotes is doubled), or "
            "use --quote none if quotes are part of the text"
        ) from None
    except UnicodeError as error:
        raise decoding_error(file, error) from None
