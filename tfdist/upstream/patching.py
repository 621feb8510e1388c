"""Replaces attributes of Keras and TensorFlow, within a block or permanently."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a module, class or instance within the block, and restores it.

    Bypasses Keras's tracking of attributes of layers and models. Blocks must nest: replicas that
    are traced in turns, each in its own thread, must not enter one each.

    Raises:
        RuntimeError: Another block or thread has replaced the attribute meanwhile and still does.
    """
    before = vars(owner).get(name, _ABSENT)
    replace(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name, value) is not value:
            raise RuntimeError(
                f"{name!r} of {owner!r} was replaced by another thread meanwhile. "
                "Train in one thread of a process at a time."
            )
        if before is _ABSENT:
            _root(owner).__delattr__(owner, name)
        else:
            replace(owner, name, before)


@contextmanager
def all_replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Sets several attributes of an owner within the block, by name: see `replaced`."""
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(replaced(owner, name, value))
        yield


def calling_package(depth: int = 2) -> str:
    """Returns the top-level package of the code that called, or imports, through `sys._getframe`.

    Args:
        depth: Number of frames to skip: 1 is the caller of this function, 2 is its caller.
    """
    frame: Any = sys._getframe(depth)
    while frame.f_back is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def replace(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of a module, class or instance permanently, bypassing Keras's tracking."""
    _root(owner).__setattr__(owner, name, value)


def _root(owner: Any) -> Any:
    return type if isinstance(owner, type) else object
