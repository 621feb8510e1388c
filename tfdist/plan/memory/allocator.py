"""TensorFlow's allocator of a GPU, in miniature: what it hands out is often larger than was asked.

Sources: `tensorflow/tsl/framework/bfc_allocator.{h,cc}` (best fit with coalescing). A free piece is
given away whole unless it is at least twice as large as what is wanted, or 128 MB larger; regions
of twice the size of the last are added where nothing fits. What a device counts as in use, and runs
out of, are such pieces. Imports no TensorFlow.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

_UNIT = 256
_FIRST_REGION = 2 << 20
#: The most of a piece that is given away with it.
_MOST_WASTE = 128 << 20


class Piece(NamedTuple):
    """Memory that is handed out; pieces that touch are of one region."""

    start: int
    size: int


class Allocator:
    """Best fit with coalescing.

    Attributes:
        in_use: Bytes that are handed out.
        peak: The most that were.
    """

    def __init__(self) -> None:
        self.in_use = self.peak = 0
        self._free: list[tuple[int, int]] = []  # size and start, in this order
        self._free_from: dict[int, int] = {}  # sizes of free pieces by where they start
        self._free_to: dict[int, int] = {}  # starts of free pieces by where they end
        self._end, self._region = 0, _FIRST_REGION

    def allocate(self, num_bytes: int) -> Piece:
        """Returns a piece of at least so many bytes."""
        wanted = max(1, -(-num_bytes // _UNIT)) * _UNIT
        place = bisect.bisect_left(self._free, (wanted, -1))
        if place == len(self._free):
            self._extend(wanted)
            place = bisect.bisect_left(self._free, (wanted, -1))
        size, start = self._free[place]
        self._take(start)
        if size >= 2 * wanted or size - wanted >= _MOST_WASTE:
            self._give(start + wanted, size - wanted)
            size = wanted
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        return Piece(start, size)

    def free(self, piece: Piece) -> None:
        """Takes a piece back, and joins it with those free ones that it touches."""
        start, size = piece
        self.in_use -= size
        if (before := self._free_to.get(start)) is not None:
            size += self._take(before)
            start = before
        if start + size in self._free_from:
            size += self._take(start + size)
        self._give(start, size)

    def _extend(self, wanted: int) -> None:
        """Adds a region, which touches no other."""
        doubled = False
        while self._region < wanted:
            self._region, doubled = 2 * self._region, True
        start = self._end + 1
        self._end = start + self._region
        self._give(start, self._region)
        if not doubled:
            self._region *= 2

    def _give(self, start: int, size: int) -> None:
        bisect.insort(self._free, (size, start))
        self._free_from[start], self._free_to[start + size] = size, start

    def _take(self, start: int) -> int:
        size = self._free_from.pop(start)
        del self._free_to[start + size]
        del self._free[bisect.bisect_left(self._free, (size, start))]
        return size
