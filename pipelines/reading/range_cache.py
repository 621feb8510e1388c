"""A local folder that caches byte ranges of remote files, shared by all processes of a machine.

Each range is one file, which is written under a temporary name and renamed. So readers never see
partial files, and of two processes that write the same range, either result is right. A cache that
cannot be written, for example because the disk is full, is not an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

from pipelines.errors import DataError
from pipelines.reading.read_ahead import Fetch, Range

#: Names of the files of a cache, also of those that are being written.
_NAME = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.[0-9a-f]{32}")
#: Fraction of the size limit that may be written before old files are removed again.
_SLACK = 0.05
#: Fraction of the size limit that is left after old files were removed.
_KEPT = 0.9


def cache_ranges(
    fetch: Fetch, directory: str | Path, limit: int, versions: Mapping[str, str]
) -> Fetch:
    """Returns a function that fetches ranges through the cache.

    Args:
        fetch: Returns the bytes of a range.
        directory: The folder of the cache, which is created.
        limit: Size limit of the folder in bytes.
        versions: SHA-256 of each file by its path, so that a replaced file is fetched again.
    """
    cache = _Cache(Path(directory), limit)

    def fetch_through_cache(byte_range: Range) -> bytes:
        name = hashlib.sha256(
            f"{byte_range} {versions.get(byte_range.path, '')}".encode()
        ).hexdigest()
        data = cache.get(name, byte_range.end - byte_range.begin)
        if data is None:
            data = fetch(byte_range)
            cache.put(name, data)
        return data

    return fetch_through_cache


class _Cache:
    """The folder of a cache."""

    def __init__(self, directory: Path, limit: int) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"{directory}: the folder of the cache cannot be created: {error.strerror}; choose "
                "another one"
            ) from None
        self._directory, self._limit = directory, limit
        self._num_written = limit  # removes old files of earlier runs at the first write
        self._lock = threading.Lock()

    def get(self, name: str, num_bytes: int) -> bytes | None:
        """Returns the contents of a file of this size, or None."""
        path = self._directory / name
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            if len(data) == num_bytes:
                os.utime(path)  # marks it as recently used
                return data
        return None

    def put(self, name: str, data: bytes) -> None:
        """Writes a file, and removes old files if the folder has become too large."""
        temporary = self._directory / f".{name}.{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            try:
                temporary.write_bytes(data)
                temporary.replace(self._directory / name)
            finally:
                temporary.unlink(missing_ok=True)
        with self._lock:
            self._num_written += len(data)
            if self._num_written > _SLACK * self._limit:
                self._num_written = 0
                self._remove_old()

    def _remove_old(self) -> None:
        files = []
        with contextlib.suppress(OSError), os.scandir(self._directory) as entries:
            # The user may have other files in this folder.
            for entry in filter(lambda entry: _NAME.fullmatch(entry.name), entries):
                with contextlib.suppress(OSError):  # another process may have removed it
                    status = entry.stat()
                    files.append((status.st_mtime_ns, status.st_size, entry.path))
        total = sum(size for _, size, _ in files)
        if total <= self._limit:
            return
        for _, size, path in sorted(files):
            with contextlib.suppress(OSError):
                Path(path).unlink()
            total -= size
            if total <= _KEPT * self._limit:
                return
