"""The one way in which functions of Keras and TensorFlow are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a module, class or instance within the block, and puts it back.

    Past Keras's tracking of what is assigned to layers and models.
    """
    before = vars(owner).get(name, _ABSENT)
    root = type if isinstance(owner, type) else object
    root.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            root.__delattr__(owner, name)
        else:
            root.__setattr__(owner, name, before)
