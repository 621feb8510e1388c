"""What can be packed: one file a source. `open_source` finds the right one for a folder or file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from pipelines.errors import DataError
from pipelines.sources.source import Options, Source

#: Modules by the name that users give: layouts that nothing else looks like, then the general ones.
_LAYOUTS = {"tfds": "tfds", "cifar": "cifar", "celeba": "celeba", "imagenet": "imagenet"}
_GENERAL = {
    "images": "images",
    "csv": "table",
    "parquet": "table",
    "numpy": "arrays",
    "text": "text",
}
_MODULES = _LAYOUTS | _GENERAL
SOURCES = tuple(_MODULES)


def open_source(location: str, kind: str, options: Options) -> Source:
    """Opens what is to be packed.

    Args:
        location: a folder, a file or `tfds:NAME`.
        kind: one of `SOURCES`, or `auto` to find out.
        options: of the command; those given must be ones that the source knows.

    Raises:
        DataError: there is nothing, nothing that is known, or an option that does not apply.
    """
    if not location.startswith("tfds:") and not Path(location).exists():
        raise DataError(f"{location}: no such file or folder; check the path")
    kind = _kind_of(location) if kind == "auto" else kind
    module = _module(kind)
    options.check(kind, module.OPTIONS)
    source: Source = module.open_source(location, options)
    if len(source) == 0:
        raise DataError(f"{location}: expected {kind}, found none")
    return source


def _kind_of(location: str) -> str:
    """What lies there.

    Raises:
        DataError: nothing that is known, or several things.
    """
    for name in _LAYOUTS:
        if _module(name).fits(location):
            return name
    # A dictionary by module, since two names may be of one.
    found = {_MODULES[name]: name for name in _GENERAL if _module(name).fits(location)}
    if len(found) == 1:
        return next(iter(found.values()))
    what = " and ".join(found.values()) or "nothing that can be packed"
    raise DataError(
        f"{location}: found {what} here; say what it is with --from ({', '.join(SOURCES)})"
    )


def _module(kind: str) -> Any:
    return importlib.import_module(f"pipelines.sources.{_MODULES[kind]}")
