"""How many steps went into a call when data were gone through last: the next pass begins so."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, MutableMapping
from typing import Any

from tfdist.loops.feed import Feed


class Paces:
    """Steps per call, by the loop and the data.

    Data are the same where they are the same object, or arrays of the same shapes in batches of the
    same size. Others may be slower to read, and a call at the pace of those before would last.
    """

    def __init__(self) -> None:
        self._of_arrays: dict[Hashable, int] = {}
        self._of_data: MutableMapping[Any, dict[str, int]] = weakref.WeakKeyDictionary()

    def known(self, loop: str, feed: Feed) -> int:
        """Returns what was noted last; 0: nothing was.

        Args:
            loop: Which of Keras's.
            feed: Of the data.
        """
        if feed.are_arrays:
            return self._of_arrays.get((loop, _kind(feed)), 0)
        own = self._of_data.get(feed.source) if _is_kept(feed.source) else None
        return own.get(loop, 0) if own else 0

    def note(self, loop: str, feed: Feed, num_steps: int) -> None:
        """Keeps a number of steps for the next pass over the same data."""
        if feed.are_arrays:
            self._of_arrays[loop, _kind(feed)] = num_steps
        elif _is_kept(feed.source):
            self._of_data.setdefault(feed.source, {})[loop] = num_steps


def _kind(feed: Feed) -> Hashable:
    return feed.batch_size, str(feed.element_spec)


def _is_kept(source: Any) -> bool:
    """Whether an object can be known again without being kept alive."""
    return isinstance(source, Hashable) and type(source).__weakrefoffset__ != 0
