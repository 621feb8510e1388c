"""Replaces attributes of Keras and TensorFlow, within a block or permanently."""

from __future__ import annotations

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


def replace(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of a module, class or instance permanently, bypassing Keras's tracking."""
    _root(owner).__setattr__(owner, name, value)


def _root(owner: Any) -> Any:
    return type if isinstance(owner, type) else object
