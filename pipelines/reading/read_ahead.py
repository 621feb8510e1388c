"""Fetches byte ranges of remote files in a known order, many at a time and ahead of their use."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import NamedTuple

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
    """One request, and the number of ranges that it serves."""

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
