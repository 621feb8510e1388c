"""The public names: all on the API page, and `__all__` of each public package."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from tests.docs.code_blocks import API
from tests.docs.execution import public
from tests.support import ROOT

_DIRECTIVE = re.compile(
    r"\.\. (automodule|py:module|autoclass|autofunction):: (\S+)\n((?:   :.*\n)*)"
)


#: Public names that the API page describes in words.
_IN_WORDS = ["tfdist.config.TrainConfig"]


def names() -> Iterator[str]:
    """Yields the dotted names of all public classes, functions, methods and properties."""
    yield from _IN_WORDS
    for page in (API, ROOT / "docs/errors.md"):
        for kind, path, options in _DIRECTIVE.findall(page.read_text()):
            if kind.endswith("module"):
                yield from members(path, shown(path, options) if kind == "automodule" else set())
            else:
                yield path
                if kind == "autoclass" and ":no-members:" not in options:
                    yield from methods(path)


def shown(path: str, options: str) -> set[str]:
    """Returns the names in a module that an `automodule` with these options shows."""
    listed = re.search(r":members: (.*)", options)
    hidden = re.search(r":exclude-members: (.*)", options)
    names_of_module = listed[1].split(", ") if listed else vars(public(path))
    return set(names_of_module) - set(hidden[1].split(", ") if hidden else ())


def members(path: str, wanted: set[str]) -> Iterator[str]:
    """Yields the classes and functions of a module among `wanted` and in its `__all__`."""
    module = public(path)
    for name in sorted(wanted | set(getattr(module, "__all__", ()))):
        if not name.startswith("_") and _is_of(getattr(module, name), path):
            yield f"{path}.{name}"


def methods(path: str) -> Iterator[str]:
    """Yields the public methods and properties that a class itself defines."""
    for name, value in vars(public(path)).items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield f"{path}.{name}"


def _is_of(value: Any, package: str) -> bool:
    is_code = inspect.isclass(value) or inspect.isfunction(value)
    return is_code and value.__module__.startswith(package)
