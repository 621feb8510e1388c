"""The data formats that can be packed, one module each. `open_source` detects the format."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from pipelines import storage
from pipelines.errors import DataError
from pipelines.sources.source import Options, Source, add_files, is_folder, list_again
from pipelines.storage import AnyPath

#: Modules by the name of the format: specific layouts, which are tried first, then general formats.
_LAYOUTS = {"tfds": "tfds", "cifar": "cifar", "celeba": "celeba", "imagenet": "imagenet"}
_GENERAL = {
    "webdataset": "webdataset",
    "images": "images",
    "csv": "table",
    "jsonl": "table",
    "parquet": "table",
    "numpy": "arrays",
    "text": "text",
}
_MODULES = _LAYOUTS | _GENERAL
SOURCES = tuple(_MODULES)


def open_source(location: str, kind: str, options: Options) -> Source:
    """Opens a source of examples.

    Args:
        location: A folder or a file, local or a URL, or `tfds:NAME`.
        kind: One of `SOURCES`, or `auto` to detect it.
        options: Options of the command, which must apply to the source.

    Raises:
        DataError: The location or its format is unknown, or an option does not apply.
    """
    list_again()
    path: AnyPath | None = None
    if not location.startswith("tfds:"):
        path = storage.at(location)
        if not (path.exists() if isinstance(path, Path) else path.is_file() or path.is_dir()):
            raise DataError(f"{location}: no such file or folder; check the path")
        if kind in _LAYOUTS and not isinstance(path, Path):
            raise DataError(f"{location}: --from {kind} reads local folders; download it first")
        location = str(path)  # without file://
    kind = _kind_of(location) if kind == "auto" else kind
    module = _module(kind)
    options.check(kind, module.OPTIONS)
    source: Source = module.open_source(location, options)
    if len(source) == 0:
        raise DataError(f"{location}: expected {kind}, found none")
    if path is not None and source.files is not None:
        if is_folder(path):
            add_files(source.account, source, path, kind)
        else:
            source.account.use("files", 1)
    source.account.use("examples", len(source))
    return source


def _kind_of(location: str) -> str:
    """Detects the format of a location.

    Raises:
        DataError: The format is unknown or ambiguous.
    """
    for name in _LAYOUTS:
        if not storage.is_url(location) and _module(name).fits(location):
            return name
    # A dictionary by module, because a module may have two names.
    found = {_MODULES[name]: name for name in _GENERAL if _module(name).fits(location)}
    if len(found) == 1:
        return next(iter(found.values()))
    what = " and ".join(found.values()) or "nothing that can be packed"
    raise DataError(
        f"{location}: found {what} here; choose the format with --from ({', '.join(SOURCES)})"
    )


def _module(kind: str) -> Any:
    return importlib.import_module(f"pipelines.sources.{_MODULES[kind]}")
