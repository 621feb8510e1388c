"""Fetches byte ranges of remote files in a known order, many at a time and ahead of their use.

`cache_ranges` keeps them in a local folder that all processes of a machine share. Each range is one
file, which is written under a temporary name and renamed. So readers never see partial files, and
of two processes that write the same range, either result is right. A cache that cannot be written,
for example because the disk is full, is not an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from pipelines.errors import DataError

#: Requests at a time, many more than cores, because they wait for the network.
NUM_REQUESTS = 48
#: Requests at a time in the beginning. They share the bandwidth, and the first ranges arrive soon.
FIRST_REQUESTS = 8
#: Neighboring ranges are merged to requests of up to this size.
_REQUEST_BYTES = 4 << 20
#: Ranges are merged across gaps of up to this size, which are then fetched and thrown away.
_GAP_BYTES = 16 << 10
#: Ranges whose neighbors are searched at a time.
_NUM_MERGED = 256


class Range(NamedTuple):
    """Bytes `begin` to `end` of a file."""

    path: str
    begin: int
    end: int


#: Returns the bytes of a range.
Fetch = Callable[[Range], bytes]


class _Request(NamedTuple):
    range: Range
    num_ranges: int


def read_ahead(
    ranges: Iterable[Range], fetch: Fetch, limit: int, *, merge: bool = True
) -> Iterator[bytes]:
    """Yields the bytes of ranges in their order, and fetches the following ones meanwhile.

    Args:
        ranges: The ranges in the order of their use.
        fetch: Returns the bytes of a range. Called in several threads.
        limit: Largest number of bytes that are fetched and not yet used. One request may exceed it.
        merge: Whether to fetch neighboring ranges by one request.

    Raises:
        Exception: What `fetch` raises, where the range would have been yielded.
    """
    planned: Iterator[tuple[Range, _Request]] = ((one, _Request(one, 1)) for one in ranges)
    if merge:
        planned = _plan(ranges, limit // 4)
    pending: deque[tuple[Range, _Request]] = deque()  # submitted, in the order of use
    futures: dict[_Request, Future[bytes]] = {}
    left: dict[_Request, int] = {}
    num_bytes = 0
    pool, gradual = ThreadPoolExecutor(NUM_REQUESTS, "read-ahead"), _GradualStart(fetch)
    try:
        following = next(planned, None)
        while pending or following:
            while following and (
                following[1] in futures
                or not pending
                or num_bytes + _size(following[1].range) <= limit
            ):
                byte_range, request = following
                if request not in futures:
                    futures[request] = pool.submit(gradual.fetch, request.range)
                    left[request] = request.num_ranges
                    num_bytes += _size(request.range)
                pending.append((byte_range, request))
                following = next(planned, None)
            byte_range, request = pending.popleft()
            begin = request.range.begin
            yield futures[request].result()[byte_range.begin - begin : byte_range.end - begin]
            left[request] -= 1
            if not left[request]:
                del futures[request], left[request]
                num_bytes -= _size(request.range)
    finally:
        gradual.stop()
        pool.shutdown(wait=False, cancel_futures=True)


class _GradualStart:
    """Admits few requests at first, and one more for each that is complete."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch, self._is_stopped = fetch, False
        self._admitted = threading.Semaphore(FIRST_REQUESTS)
        self._more = iter(range(NUM_REQUESTS - FIRST_REQUESTS))

    def fetch(self, byte_range: Range) -> bytes:
        """Returns the bytes of a range when it is admitted."""
        with self._admitted:
            # At its exit, Python waits for all that were submitted.
            if self._is_stopped or not threading.main_thread().is_alive():
                raise CancelledError
            data = self._fetch(byte_range)
        if next(self._more, None) is not None:
            self._admitted.release()
        return data

    def stop(self) -> None:
        """Cancels the requests that are not yet admitted."""
        self._is_stopped = True


def _plan(ranges: Iterable[Range], group_bytes: int) -> Iterator[tuple[Range, _Request]]:
    """Yields each range with the request that serves it.

    Neighbors are merged within groups of limited size, so that fetched data are soon used.
    """
    remaining = iter(ranges)
    while group := list(itertools.islice(remaining, _NUM_MERGED)):
        while group:
            num_taken, num_bytes = 0, 0
            while num_taken < len(group) and (not num_taken or num_bytes <= group_bytes):
                num_bytes += _size(group[num_taken])
                num_taken += 1
            yield from _merged(group[:num_taken])
            group = group[num_taken:]


def _merged(group: list[Range]) -> Iterator[tuple[Range, _Request]]:
    runs: list[list[Range]] = []
    for one in sorted(group):
        last = runs[-1][-1] if runs else None
        if (
            last
            and last.path == one.path
            and last.end <= one.begin <= last.end + _GAP_BYTES
            and one.end - runs[-1][0].begin <= _REQUEST_BYTES
        ):
            runs[-1].append(one)
        else:
            runs.append([one])
    requests = {}
    for run in runs:
        request = _Request(Range(run[0].path, run[0].begin, run[-1].end), len(run))
        requests.update(dict.fromkeys(run, request))
    return ((one, requests[one]) for one in group)


def _size(byte_range: Range) -> int:
    return byte_range.end - byte_range.begin


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
