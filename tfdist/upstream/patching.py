"""Putting functions of Keras out of action while something is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a module, class or instance, past Keras's tracking, and undoes it."""
    absent = object()
    before = vars(owner).get(name, absent)
    set_, delete = (
        (type.__setattr__, type.__delattr__)
        if isinstance(owner, type)
        else (
            object.__setattr__,
            object.__delattr__,
        )
    )
    set_(owner, name, value)
    try:
        yield
    finally:
        if before is absent:
            delete(owner, name)
        else:
            set_(owner, name, before)
