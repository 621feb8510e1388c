"""TFRecord files read byte by byte: from end to end past damage, or at a place. No TensorFlow."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipelines.errors import DataError
from pipelines.format.compression import INFLATE_ERRORS, Compression, open_to_read
from pipelines.format.framing import HEADER_BYTES, Record, framed_bytes, read_length, read_record


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
                record, length = read_record(file, offset, num_bytes)
            except INFLATE_ERRORS as error:
                yield Record(offset, b"", f"{compression} data damaged or cut off ({error})")
                return
            if record is not None:
                yield record
            if length is not None:
                offset += framed_bytes(length)
                continue
            found = _next_sound(file, offset) if record and num_bytes else None
            if found is None:
                return
            offset = found
            file.seek(offset)


def sound_records(path: Path, compression: Compression = "") -> Iterator[Record]:
    """Reads a file from end to end.

    Raises:
        DataError: a record is damaged.
    """
    for record in records(path, compression):
        if record.problem:
            raise _damage(path, record.offset, record.problem)
        yield record


def read_at(file: BinaryIO, offset: int) -> bytes:
    """The data of the record at an offset of an uncompressed file.

    Raises:
        DataError: it is damaged.
    """
    file.seek(offset)
    record, _ = read_record(file, offset, os.fstat(file.fileno()).st_size)
    if record is None or record.problem:
        problem = record.problem if record else None
        raise _damage(file.name, offset, problem or "the file ends here")
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
            length, problem = read_length(file.read(HEADER_BYTES))
            end = offset + framed_bytes(length)
            if problem or end > num_bytes:
                raise _damage(path, offset, problem or "cut off")
            yield offset
            offset = end


def compression_of(path: Path) -> Compression:
    """How a file is compressed, from its first bytes.

    Raises:
        DataError: it is no TFRecord file.
    """
    compressions: tuple[Compression, ...] = ("", "GZIP", "ZLIB")
    for compression in compressions:
        with contextlib.suppress(*INFLATE_ERRORS), open_to_read(path, compression) as file:
            header = file.read(HEADER_BYTES)
            if not header or not read_length(header)[1]:
                return compression
    raise DataError(
        f"{path}: not a TFRecord file: its first bytes are no record's; name the files with --files"
    )


def _damage(path: Path | str, offset: int, problem: str) -> DataError:
    return DataError(f"{path}: record at byte {offset}: {problem}; restore the file")


def _next_sound(file: BinaryIO, offset: int) -> int | None:
    """Where behind `offset` a record begins whose length is sound and fits into the file."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
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
