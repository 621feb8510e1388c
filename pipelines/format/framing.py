"""The framing of a TFRecord file, read and written byte by byte. Imports no TensorFlow.

A record is its length (uint64), the masked CRC-32C of these 8 bytes, the data, and the masked
CRC-32C of the data, little-endian
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import google_crc32c

from pipelines.errors import DataError
from pipelines.format.compression import INFLATE_ERRORS, open_to_read
from pipelines.format.index import Compression

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")


class Record(NamedTuple):
    """One record, or what stands where one should be.

    Attributes:
        offset: of its first byte in the file, or in what a compressed file unpacks to.
        data: its contents, without the framing.
        problem: what is wrong with it, or None.
    """

    offset: int
    data: bytes
    problem: str | None


def frame(data: bytes) -> bytes:
    """One record as it stands in a file."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _FOOTER.pack(_checksum(length)), data, _FOOTER.pack(_checksum(data))))


def records(path: Path, compression: Compression = "") -> Iterator[Record]:
    """Reads a file from end to end, past damaged records.

    Behind a damaged length the next record is searched for; in a compressed file, and where none
    is found, the damaged one is the last.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_to_read(path, compression))
        num_bytes = path.stat().st_size if compression == "" else None
        offset = 0
        while True:
            try:
                record, length = _next(file, offset, num_bytes)
            except INFLATE_ERRORS as error:
                yield Record(offset, b"", f"{compression} data damaged or cut off ({error})")
                return
            if record is not None:
                yield record
            if length is not None:
                offset += _HEADER.size + length + _FOOTER.size
                continue
            found = _next_sound(file, offset) if record and num_bytes else None
            if found is None:
                return
            offset = found
            file.seek(offset)


def read_at(file: BinaryIO, offset: int) -> bytes:
    """The data of the record at an offset of an uncompressed file.

    Raises:
        DataError: it is damaged.
    """
    file.seek(offset)
    record, _ = _next(file, offset, os.fstat(file.fileno()).st_size)
    if record is None or record.problem:
        problem = record.problem if record else "the file ends here"
        raise DataError(f"{file.name}: record at byte {offset}: {problem}; restore the file")
    return record.data


def offsets(path: Path) -> Iterator[int]:
    """Where each record of an uncompressed file begins, without reading their data.

    Raises:
        DataError: a length is damaged, or the file cut off.
    """
    num_bytes, offset = path.stat().st_size, 0
    with path.open("rb") as file:
        while offset < num_bytes:
            file.seek(offset)
            length, problem = _length(file.read(_HEADER.size))
            end = offset + _HEADER.size + length + _FOOTER.size
            if problem or end > num_bytes:
                raise DataError(
                    f"{path}: record at byte {offset}: {problem or 'cut off'}; restore the file"
                )
            yield offset
            offset = end


def compression_of(path: Path) -> Compression:
    """How a file is compressed, from its first bytes.

    Raises:
        DataError: it is no TFRecord file.
    """
    kinds: tuple[Compression, ...] = ("", "GZIP", "ZLIB")
    for kind in kinds:
        with contextlib.suppress(*INFLATE_ERRORS), open_to_read(path, kind) as file:
            header = file.read(_HEADER.size)
            if not header or not _length(header)[1]:
                return kind
    raise DataError(
        f"{path}: not a TFRecord file: its first bytes are no record's; name the files with --files"
    )


def _next(file: BinaryIO, offset: int, num_bytes: int | None) -> tuple[Record | None, int | None]:
    """The record at `offset`, and its length if the next one can be found by it."""
    header = file.read(_HEADER.size)
    if not header:
        return None, None
    length, problem = _length(header)
    if problem:
        return Record(offset, b"", problem), None
    if num_bytes is not None:  # before memory for it is asked for
        length_left = num_bytes - offset - _HEADER.size - _FOOTER.size
        if length > length_left:
            return Record(offset, b"", _cut_off(length, max(length_left, 0))), None
    data, footer = file.read(length), file.read(_FOOTER.size)
    if len(footer) < _FOOTER.size:
        return Record(offset, b"", _cut_off(length, len(data))), None
    if _FOOTER.unpack(footer)[0] != _checksum(data):
        return Record(offset, data, f"checksum of its {length} bytes of data is wrong"), length
    return Record(offset, data, None), length


def _next_sound(file: BinaryIO, offset: int) -> int | None:
    """Where behind `offset` a record begins whose length is sound and fits into the file."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # Lengths below 2^40 end in three zero bytes, which are found much faster than checksums
        # are computed at every byte.
        at = data.find(bytes(3), offset + 6)
        while at >= 0:
            start = at - 5
            length, problem = _length(data[start : start + _HEADER.size])
            if not problem and start + _HEADER.size + length + _FOOTER.size <= len(data):
                return start
            at = data.find(bytes(3), at + 1)
    return None


def _length(header: bytes) -> tuple[int, str | None]:
    """The length that a header tells, and what is wrong with it."""
    if len(header) < _HEADER.size:
        return 0, f"cut off: {len(header)} bytes where a record's first {_HEADER.size} should be"
    length, checksum = _HEADER.unpack(header)
    if checksum != _checksum(header[:8]):
        return 0, "checksum of its length is wrong, so its end is not known"
    return length, None


def _cut_off(expected: int, found: int) -> str:
    return f"cut off: {found} bytes where {expected} should be"


def _checksum(data: bytes) -> int:
    """CRC-32C, rotated and shifted so that data which hold their own checksums are checked too."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
