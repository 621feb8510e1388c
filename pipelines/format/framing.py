"""The framing of one record in a TFRecord file, read and written. Imports no TensorFlow.

A record is its length (uint64), the masked CRC-32C of these 8 bytes, the data, and the masked
CRC-32C of the data, little-endian
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
"""

from __future__ import annotations

import struct
from typing import BinaryIO, NamedTuple

import google_crc32c

_HEADER = struct.Struct("<QI")
#: Bytes before a record's data: what `read_length` takes.
HEADER_BYTES = _HEADER.size
_FOOTER = struct.Struct("<I")
#: Bytes of a record in its file besides its data.
FRAMING_BYTES = _HEADER.size + _FOOTER.size


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


def framed_bytes(length: int) -> int:
    """The bytes in a file that a record of so many bytes of data takes."""
    return HEADER_BYTES + length + _FOOTER.size


def read_record(
    file: BinaryIO, offset: int, num_bytes: int | None
) -> tuple[Record | None, int | None]:
    """Reads the record that begins where the file stands.

    Args:
        file: stands at the record; unpacked where it is compressed.
        offset: where that is.
        num_bytes: of the whole file, or None where it is compressed and nobody knows.

    Returns:
        The record, or None at the end of the file; and the length of its data if it can be relied
        on, so that the next record is found behind it.
    """
    header = file.read(HEADER_BYTES)
    if not header:
        return None, None
    length, problem = read_length(header)
    if problem:
        return Record(offset, b"", problem), None
    if num_bytes is not None:  # before memory for it is asked for
        length_left = num_bytes - offset - framed_bytes(0)
        if length > length_left:
            return Record(offset, b"", _cut_off(length, max(length_left, 0))), None
    data, footer = file.read(length), file.read(_FOOTER.size)
    if len(footer) < _FOOTER.size:
        return Record(offset, b"", _cut_off(length, len(data))), None
    if _FOOTER.unpack(footer)[0] != _checksum(data):
        return Record(offset, data, f"checksum of its {length} bytes of data is wrong"), length
    return Record(offset, data, None), length


def read_length(header: bytes) -> tuple[int, str | None]:
    """The length of the data that a record's first bytes tell, and what is wrong with them."""
    if len(header) < HEADER_BYTES:
        return 0, f"cut off: {len(header)} bytes where a record's first {HEADER_BYTES} should be"
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
