"""Files that are compressed as TensorFlow compresses TFRecords, read as if they were not."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import BinaryIO, Literal, cast

#: Of a file, as TensorFlow names it; empty for none.
Compression = Literal["", "GZIP", "ZLIB"]

#: Damage of a compressed file, as the standard library reports it.
INFLATE_ERRORS = (zlib.error, gzip.BadGzipFile, EOFError)


def open_to_read(path: Path, compression: Compression) -> BinaryIO:
    """Opens a file; what is read is uncompressed."""
    if compression == "GZIP":
        return cast(BinaryIO, gzip.open(path))
    if compression == "ZLIB":
        return io.BufferedReader(_Inflated(path))
    return path.open("rb")


class _Inflated(io.RawIOBase):
    """A zlib stream, unpacked; the standard library has one for gzip only."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._inflate = zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fills the buffer as far as the next piece of the file goes; 0 at the end."""
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
