"""Writing one TFRecord file, and what the index says of it. Imports no TensorFlow."""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from pipelines.format.compression import Compression
from pipelines.format.framing import frame
from pipelines.format.index import Shard

#: Records to collect before they are hashed and written.
_CHUNK_BYTES = 1 << 20


def shard_name(number: int, num_shards: int) -> str:
    """The name of a shard's file: in the order of the names as in that of the numbers."""
    return f"data-{number:05d}-of-{num_shards:05d}.tfrecord"


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class ShardWriter:
    """Writes records to a new file; the same records give the same bytes.

    A context manager: on leaving without an error the file is complete and on the disk, so that
    after a power cut no good name can stand for an empty file. `shard` describes it then.
    """

    shard: Shard

    def __init__(self, path: Path, compression: Compression = "") -> None:
        self._path = path
        self._file = path.open("wb")
        self._compressor = _compressor(compression)
        self._hash = hashlib.sha256()
        self._chunk: list[bytes] = []
        self._chunk_bytes = self._num_records = 0

    def write(self, data: bytes) -> None:
        """Appends one record."""
        framed = frame(data)
        self._chunk.append(framed)
        self._chunk_bytes += len(framed)
        self._num_records += 1
        if self._chunk_bytes >= _CHUNK_BYTES:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is not None:
                return
            self._flush()
            if self._compressor:
                self._put(self._compressor.flush())
            self._file.flush()
            os.fsync(self._file.fileno())
        self.shard = Shard(
            name=self._path.name,
            num_records=self._num_records,
            num_bytes=self._path.stat().st_size,
            sha256=self._hash.hexdigest(),
        )

    def _flush(self) -> None:
        data = b"".join(self._chunk)
        self._chunk, self._chunk_bytes = [], 0
        self._put(self._compressor.compress(data) if self._compressor else data)

    def _put(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)


def _compressor(compression: Compression) -> _Compressor | None:
    if compression == "GZIP":
        # zlib's own header for gzip holds no time and no name, so equal data are equal files.
        return zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    return zlib.compressobj() if compression == "ZLIB" else None
