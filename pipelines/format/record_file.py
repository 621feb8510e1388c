"""TFRecord files, read and written byte by byte. Does not import TensorFlow.

A record is its length (uint64), the masked CRC-32C of these 8 bytes, the data, and the masked
CRC-32C of the data, little-endian
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details). A file may be
compressed as a whole, as TensorFlow does it.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import mmap
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import google_crc32c
import numpy as np

from pipelines import storage
from pipelines.errors import DataError
from pipelines.storage import AnyPath

_HEADER = struct.Struct("<QI")
#: Bytes before a record's data, the argument of `read_length`.
HEADER_BYTES = _HEADER.size
_HEADER_DTYPE = np.dtype([("length", "<u8"), ("checksum", "<u4")])
_FOOTER = struct.Struct("<I")
#: Bytes of a record in its file in addition to its data.
FRAMING_BYTES = _HEADER.size + _FOOTER.size


class DamageError(DataError):
    """A record that is damaged."""


class Record(NamedTuple):
    """One record, damaged or not.

    Attributes:
        offset: Position of its first byte in the (decompressed) file.
        data: Its contents without the framing.
        problem: A description of the damage, or None.
    """

    offset: int
    data: bytes
    problem: str | None


def frame(data: bytes) -> bytes:
    """Returns a record with its framing, as stored in a file."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _FOOTER.pack(_checksum(length)), data, _FOOTER.pack(_checksum(data))))


def framed_bytes(length: int) -> int:
    """Returns the size in a file of a record with `length` bytes of data."""
    return HEADER_BYTES + length + _FOOTER.size


def read_record(
    file: BinaryIO, offset: int, num_bytes: int | None
) -> tuple[Record | None, int | None]:
    """Reads the record at the current position of a file.

    Args:
        file: A (decompressed) file, positioned at the record.
        offset: That position.
        num_bytes: Size of the whole file, or None if unknown because it is compressed.

    Returns:
        The record, or None at the end of the file; and the length of its data if that is reliable,
        so that the next record can be found, or None.
    """
    header = file.read(HEADER_BYTES)
    if not header:
        return None, None
    length, problem = read_length(header)
    if problem:
        return Record(offset, b"", problem), None
    if num_bytes is not None:  # checked before the memory is allocated
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
    """Returns the data length in a record's header, and a description of its damage or None."""
    if len(header) < HEADER_BYTES:
        return 0, f"truncated: {len(header)} of the {HEADER_BYTES} bytes of a record's header"
    length, checksum = _HEADER.unpack(header)
    if checksum != _checksum(header[:8]):
        return 0, "checksum of its length is wrong, so its end is not known"
    return length, None


def _cut_off(expected: int, num_bytes: int) -> str:
    return f"truncated: {num_bytes} of {expected} bytes"


@functools.lru_cache(1 << 16)
def _checksum_of_length(length: int) -> int:
    """Returns the checksum of a length; many records have the same one."""
    return _checksum(struct.pack("<Q", length))


def _checksum(data: bytes) -> int:
    """Returns the masked CRC-32C, which is robust for data that contain checksums themselves."""
    return _masked(google_crc32c.value(data))


def _masked(crc: Any) -> Any:
    """Returns the masked form of a checksum, or of an int64 array of them."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


#: Compression of a file, by TensorFlow's name; empty for none.
Compression = Literal["", "GZIP", "ZLIB"]

#: What the standard library raises for a damaged compressed file.
INFLATE_ERRORS = (zlib.error, gzip.BadGzipFile, EOFError)


def open_to_read(path: AnyPath, compression: Compression) -> BinaryIO:
    """Opens a file for reading its decompressed contents."""
    if compression == "GZIP":
        return cast(BinaryIO, gzip.open(path.open("rb")))
    if compression == "ZLIB":
        return io.BufferedReader(_ZlibReader(path))
    return path.open("rb")


class _ZlibReader(io.RawIOBase):
    """Decompresses a zlib stream. The standard library has a file class for gzip only."""

    def __init__(self, path: AnyPath) -> None:
        self._file = path.open("rb")
        self._inflate = zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Reads up to `len(buffer)` bytes; returns 0 at the end."""
        while not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._file.read(io.DEFAULT_BUFFER_SIZE)
            if not packed:
                if self._file.tell() == 0:
                    return 0
                raise EOFError("the file ends before the stream does")
            if data := self._inflate.decompress(packed, len(buffer)):
                buffer[: len(data)] = data
                return len(data)
        return 0

    def close(self) -> None:
        self._file.close()
        super().close()


def records(path: AnyPath, compression: Compression = "") -> Iterator[Record]:
    """Yields all records of a file, damaged ones included.

    After a damaged length, the next valid record is searched for. In a compressed file that is
    impossible, and the damaged record is the last one.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_to_read(path, compression))
        num_bytes = storage.num_bytes(path) if compression == "" else None
        offset = 0
        while True:
            try:
                record, length = read_record(file, offset, num_bytes)
            except INFLATE_ERRORS as error:
                yield Record(offset, b"", f"{compression} data damaged or truncated ({error})")
                return
            if record is not None:
                yield record
            if length is not None:
                offset += framed_bytes(length)
                continue
            next_offset = _next_valid(file, offset) if record and num_bytes else None
            if next_offset is None:
                return
            offset = next_offset
            file.seek(offset)


def intact_records(path: AnyPath, compression: Compression = "") -> Iterator[Record]:
    """Yields all records of a file.

    Raises:
        DataError: A record is damaged.
    """
    for record in records(path, compression):
        if record.problem:
            raise _damage(path, record.offset, record.problem)
        yield record


def split(data: bytes, begins: np.ndarray) -> list[bytes] | None:
    """Splits a run of records into the data of each.

    Args:
        data: The run.
        begins: Where each record begins in it, at least one, int64.

    Returns:
        The data of the records, or None unless all of them are intact.
    """
    ends = np.append(begins[1:], len(data))
    lengths = ends - begins - FRAMING_BYTES
    if lengths.min() < 0:
        return None
    data_bytes = np.frombuffer(data, np.uint8)
    headers = data_bytes[begins[:, np.newaxis] + np.arange(HEADER_BYTES)].view(_HEADER_DTYPE)[:, 0]
    footers = data_bytes[ends[:, np.newaxis] - np.arange(_FOOTER.size, 0, -1)].view("<u4")[:, 0]
    spans = zip((begins + HEADER_BYTES).tolist(), (ends - _FOOTER.size).tolist(), strict=True)
    records = [data[begin:end] for begin, end in spans]
    checksums = _masked(np.array([*map(google_crc32c.value, records)], np.int64))
    is_intact = (
        np.array_equal(headers["length"], lengths)
        and np.array_equal(headers["checksum"], [*map(_checksum_of_length, lengths.tolist())])
        and np.array_equal(footers, checksums)
    )
    return records if is_intact else None


def read_at(file: BinaryIO, offset: int, num_bytes: int | None = None) -> bytes:
    """Returns the data of the record at an offset of an uncompressed file.

    Raises:
        DamageError: The record is damaged.
    """
    if num_bytes is None:
        num_bytes = file.seek(0, io.SEEK_END)
    file.seek(offset)
    record, _ = read_record(file, offset, num_bytes)
    if record is None or record.problem:
        problem = record.problem if record else None
        raise _damage(file.name, offset, problem or "the file ends here")
    return record.data


def offsets(path: AnyPath) -> Iterator[int]:
    """Yields the offset of each record of an uncompressed file without reading the data.

    Raises:
        DataError: A length is damaged, or the file is truncated.
    """
    num_bytes, offset = storage.num_bytes(path), 0
    with path.open("rb") as file:
        while offset < num_bytes:
            file.seek(offset)
            length, problem = read_length(file.read(HEADER_BYTES))
            end = offset + framed_bytes(length)
            if problem or end > num_bytes:
                raise _damage(path, offset, problem or "truncated")
            yield offset
            offset = end


def compression_of(path: AnyPath) -> Compression:
    """Detects the compression of a file from its first bytes.

    Raises:
        DataError: The file is not a TFRecord file.
    """
    compressions: tuple[Compression, ...] = ("", "GZIP", "ZLIB")
    for compression in compressions:
        with contextlib.suppress(*INFLATE_ERRORS), open_to_read(path, compression) as file:
            header = file.read(HEADER_BYTES)
            if not header or not read_length(header)[1]:
                return compression
    raise DataError(
        f"{path}: not a TFRecord file: it does not start with a record; select files with --files"
    )


def _damage(path: AnyPath | str, offset: int, problem: str) -> DamageError:
    return DamageError(f"{path}: record at byte {offset}: {problem}; restore the file")


def _next_valid(file: BinaryIO, offset: int) -> int | None:
    """Returns where the next record with a valid length begins after `offset`, or None."""
    with _contents(file) as data:
        # Lengths below 2^40 end in three zero bytes, which are found much faster than checksums
        # are computed at every byte.
        at = data.find(bytes(3), offset + 6)
        while at >= 0:
            start = at - 5
            length, problem = read_length(data[start : start + HEADER_BYTES])
            if not problem and start + framed_bytes(length) <= len(data):
                return start
            at = data.find(bytes(3), at + 1)
    return None


@contextlib.contextmanager
def _contents(file: BinaryIO) -> Iterator[mmap.mmap | bytes]:
    try:
        descriptor = file.fileno()
    except io.UnsupportedOperation:
        file.seek(0)
        yield file.read()
        return
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        yield data
