"""Text files: compressed ones are unpacked, UTF-8 is kept byte for byte, others are decoded."""

from __future__ import annotations

import bz2
import codecs
import functools
import gzip
import io
import itertools
import lzma
import re
import zipfile
from typing import Any, BinaryIO, NamedTuple, TextIO

import charset_normalizer

from pipelines.errors import DataError
from pipelines.format.record_file import INFLATE_ERRORS
from pipelines.sources.arrow import pa
from pipelines.storage import AnyPath

UTF8 = "utf-8"
_BLOCK_BYTES, _SAMPLE_BYTES, _HEAD_BYTES = 1 << 20, 1 << 16, 64
#: Marks at the beginning of a file. UTF-32's mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF8: UTF8,
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
#: Suffixes of text files that are unpacked when they are read.
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".zip")
_ZIP = b"PK\x03\x04"
_LFS = b"version https://git-lfs.github.com/"
#: How files begin that are compressed, whatever they are called.
_COMPRESSED = re.compile(rb"\x1f\x8b\x08|BZh[1-9]1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd|PK\x03\x04")
_WESTERN = "cp1252"
#: Encodings that programs still write. Short texts fit many others by chance.
_CANDIDATES = [
    *("utf_16_le", "utf_16_be", _WESTERN, "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254"),
    *("cp1255", "cp1256", "cp932", "euc_jp", "gb18030", "big5", "cp949", "mac_roman"),
]

#: Characters of Japanese that nobody writes whole texts with, but as which many bytes decode.
_HALFWIDTH = re.compile("[\uff61-\uff9f]")


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
    with open_bytes(file) if data is None else io.BytesIO(data) as opened:
        begin, start = opened.read(_HEAD_BYTES), 0
        mark = next((mark for mark in _MARKS if begin.startswith(mark)), b"")
        while mark and begin.startswith(mark, start):  # some programs add it to files that have it
            start += len(mark)
        if given:
            try:
                name = codecs.lookup(given).name
            except LookupError:
                raise DataError(
                    f"--encoding: expected an encoding such as utf-8 or cp1252, got {given!r}"
                ) from None
            if mark and _MARKS[mark].startswith(name):
                return Encoding(_MARKS[mark], start=start)
            return Encoding(name)
        if mark:
            return Encoding(_MARKS[mark], start=start)
        opened.seek(0)
        if (invalid := _first_invalid(opened)) is None:
            return Encoding(UTF8)
        opened.seek(0)
        return Encoding(_likeliest(opened, file, invalid), is_guessed=True)


def with_compressed(*suffixes: str) -> frozenset[str]:
    """Returns suffixes of text files, and those of the same files when compressed."""
    return frozenset(suffix + packed for suffix in suffixes for packed in ("", *COMPRESSIONS))


def open_bytes(file: AnyPath) -> BinaryIO:
    """Opens a text file for reading bytes, those of its contents if it is compressed."""
    data = unpacked(file)
    return file.open("rb") if data is None else io.BytesIO(data)


@functools.lru_cache(maxsize=1)
def unpacked(file: AnyPath) -> bytes | None:
    """Returns the contents of a compressed file; None if it is not compressed.

    Raises:
        DataError: It is damaged, an archive of several files, or stands for a file elsewhere.
    """
    with file.open("rb") as opened:
        begin = opened.read(len(_LFS))
        if begin == _LFS:
            raise DataError(f"{file}: is a pointer of Git LFS; fetch the data with git lfs pull")
        if not (match := _COMPRESSED.match(begin)):
            return None
        opened.seek(0)
        try:
            if match[0] == _ZIP:
                return _only_member(opened, file)
            unpack: dict[bytes, Any] = {b"\x1f": gzip.open, b"B": bz2.open, b"\xfd": lzma.open}
            if match[0][:1] in unpack:
                return bytes(unpack[match[0][:1]](opened).read())
            return bytes(pa.CompressedInputStream(opened, "zstd").read())
        except (*INFLATE_ERRORS, OSError, lzma.LZMAError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{file}: its compressed data are damaged or cut off: {error}"
            ) from None


def _only_member(opened: BinaryIO, file: AnyPath) -> bytes:
    with zipfile.ZipFile(opened) as archive:
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
        names = [name for name in names if not name.startswith("__MACOSX/")]
        if "[Content_Types].xml" in names:
            raise DataError(f"{file}: is a workbook of Excel; save its sheet as CSV UTF-8")
        if len(names) != 1:
            raise DataError(f"{file}: contains {len(names)} files; unpack it into a folder first")
        return archive.read(names[0])


def open_text(file: AnyPath, encoding: Encoding, newline: str = "") -> TextIO:
    """Opens a file as text with its line ends unchanged."""
    opened = open_bytes(file)
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
        lines = (line for line in opened if not line.isascii())
        sample = b"".join(itertools.islice(lines, _SAMPLE_BYTES // 64))[:_SAMPLE_BYTES]
    text = sample.decode(UTF8, "replace")
    if sum(not c.isascii() for c in text) > 2 * text.count("\ufffd") and "\0" not in text:
        raise DataError(
            f"{file}: byte {invalid} is not UTF-8, although most others are; correct the file, or "
            "choose an encoding, such as --encoding cp1252"
        )
    # UTF-16 has NUL bytes at least at the ends of lines.
    candidates = [name for name in _CANDIDATES if b"\0" in sample or not name.startswith("utf")]
    matches = [
        match
        for match in charset_normalizer.from_bytes(sample, cp_isolation=candidates)
        if len(_HALFWIDTH.findall(str(match))) * 2 <= sum(not c.isascii() for c in str(match))
    ]
    if not matches:
        raise DataError(f"{file}: not text in a known encoding; choose it with --encoding NAME")
    # Among equally likely encodings, the order of the library is alphabetical.
    equal = [m for m in matches if m.chaos <= matches[0].chaos]
    is_western = any(_WESTERN in m.could_be_from_charset for m in equal)
    return _WESTERN if is_western else str(matches[0].encoding)
