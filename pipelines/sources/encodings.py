"""Encodings of text: UTF-8 is kept byte for byte, and anything else is detected and decoded."""

from __future__ import annotations

import codecs
import io
import itertools
from collections.abc import Iterable
from typing import BinaryIO, NamedTuple, TextIO

import charset_normalizer

from pipelines.errors import DataError
from pipelines.storage import AnyPath

UTF8 = "utf-8"
_BLOCK_BYTES, _SAMPLE_BYTES = 1 << 20, 1 << 16
#: Marks at the beginning of a file. UTF-32's mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF8: UTF8,
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_WESTERN = "cp1252"
#: Encodings that programs still write. Short texts fit many others by chance.
_CANDIDATES = [
    *("utf_16_le", "utf_16_be", _WESTERN, "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254"),
    *("cp1255", "cp1256", "cp932", "euc_jp", "gb18030", "big5", "cp949", "mac_roman"),
]


class Encoding(NamedTuple):
    """How a file is decoded.

    Attributes:
        name: Name of a Python codec.
        is_guessed: Whether the bytes of the file only suggest it.
        start: Number of bytes before the text: a mark of the encoding.
    """

    name: str
    is_guessed: bool = False
    start: int = 0

    @property
    def note(self) -> str:
        """What was done to the file; empty for UTF-8, which is kept byte for byte."""
        if self.name == UTF8:
            return "read without the mark of UTF-8" if self.start else ""
        return f"decoded as {self.name}"


def encoding_of(file: AnyPath, given: str | None = None, data: bytes | None = None) -> Encoding:
    """Returns the encoding of a file: the given one, that of its mark, UTF-8, or the likeliest.

    Args:
        file: The file.
        given: The name of an encoding that the user chose.
        data: The contents of the file, if they were read already.

    Raises:
        DataError: There is no such encoding, or the file is UTF-8 with a few invalid bytes.
    """
    with file.open("rb") if data is None else io.BytesIO(data) as opened:
        begin = opened.read(4)
        mark = next((mark for mark in _MARKS if begin.startswith(mark)), b"")
        if given:
            try:
                name = codecs.lookup(given).name
            except LookupError:
                raise DataError(
                    f"--encoding: expected an encoding such as utf-8 or cp1252, got {given!r}"
                ) from None
            if mark and _MARKS[mark].startswith(name):
                return Encoding(_MARKS[mark], start=len(mark))
            return Encoding(name)
        if mark:
            return Encoding(_MARKS[mark], start=len(mark))
        opened.seek(0)
        if (invalid := _first_invalid(opened)) is None:
            return Encoding(UTF8)
        opened.seek(0)
        return Encoding(_likeliest(opened, file, invalid), is_guessed=True)


def open_text(file: AnyPath, encoding: Encoding, newline: str = "") -> TextIO:
    """Opens a file as text with its line ends unchanged."""
    opened = file.open("rb")
    opened.seek(encoding.start)
    return io.TextIOWrapper(opened, encoding.name, newline=newline)


def decoding_error(file: AnyPath, error: UnicodeError) -> DataError:
    """Returns the error of bytes that a given encoding does not have."""
    return DataError(f"{file}: {error}; choose another encoding with --encoding NAME")


def _first_invalid(opened: BinaryIO) -> int | None:
    """Returns the number of the first byte that is not UTF-8 or is NUL; None if there is none."""
    decoder, start = codecs.getincrementaldecoder(UTF8)(), 0
    while True:
        data = opened.read(_BLOCK_BYTES)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            return start - pending + error.start
        if "\0" in text:  # UTF-16 of ASCII text is valid UTF-8
            return start + data.index(b"\0")
        if not data:
            return None
        start += len(data)


def _likeliest(opened: BinaryIO, file: AnyPath, invalid: int) -> str:
    sample = opened.read(_SAMPLE_BYTES)
    if b"\0" not in sample:
        opened.seek(0)
        sample = _first_bytes(line for line in opened if not line.isascii())
    text = sample.decode(UTF8, "replace")
    if sum(not c.isascii() for c in text) > 2 * text.count("\ufffd") and "\0" not in text:
        raise DataError(
            f"{file}: byte {invalid} is not UTF-8, although most others are; correct the file, or "
            "choose an encoding, such as --encoding cp1252"
        )
    matches = list(charset_normalizer.from_bytes(sample, cp_isolation=_CANDIDATES))
    if not matches:
        raise DataError(f"{file}: not text in a known encoding; choose it with --encoding NAME")
    # Among equally likely encodings, the order of the library is alphabetical.
    equal = [m for m in matches if m.chaos <= matches[0].chaos]
    is_western = any(_WESTERN in m.could_be_from_charset for m in equal)
    return _WESTERN if is_western else str(matches[0].encoding)


def _first_bytes(lines: Iterable[bytes]) -> bytes:
    return b"".join(itertools.islice(lines, _SAMPLE_BYTES // 64))[:_SAMPLE_BYTES]
