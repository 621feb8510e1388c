"""The data formats that can be packed, one module each. `open_source` detects the format."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from pipelines import storage
from pipelines.errors import DataError
from pipelines.sources import splits, table_files
from pipelines.sources.source import (
    COMPRESSED,
    Options,
    Source,
    add_files,
    has_files,
    has_suffix,
    is_folder,
    list_again,
    listing,
    read_split,
)
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
        DataError: The location or its format is unknown, it has several splits, or an option does
            not apply.
    """
    list_again()
    if location.startswith("tfds:"):
        return _opened("tfds", location, options)
    path = storage.at(location)
    if not (path.exists() if isinstance(path, Path) else path.is_file() or path.is_dir()):
        raise DataError(f"{location}: no such file or folder; check the path")
    if kind in _LAYOUTS and not isinstance(path, Path):
        raise DataError(f"{location}: --from {kind} reads local folders; download it first")
    if kind == "auto" and isinstance(path, Path):
        kind = next((name for name in _LAYOUTS if _module(name).fits(str(path))), kind)
    if kind in _LAYOUTS:
        return _opened(kind, str(path), options)  # without file://
    if kind == "auto" and is_folder(path):
        _check_boxes(path)
    root, split = path, None
    if is_folder(path) and options.splits != splits.NONE:
        path, kind, split = _chosen_split(path, kind, options)
    if kind == "auto":
        kind = _kind_of(str(path))
    taken = {"splits": None} | ({"split": None} if split else {})
    source = _opened(kind, str(path), options.model_copy(update=taken))
    if not is_folder(root):
        source.account.use("files", 1)
    elif source.files is not None:
        add_files(
            source.account, source.files, root, f"not read by --from {kind}",
            skipped=source.skipped, split=(split, path) if split else None,
        )  # fmt: skip
    return source


def _opened(kind: str, location: str, options: Options) -> Source:
    module = _module(kind)
    options.check(kind, module.OPTIONS)
    source: Source = module.open_source(location, options)
    if len(source) == 0:
        raise DataError(f"{location}: expected {kind}, found none")
    source.account.use("examples", len(source))
    return source


def _chosen_split(path: AnyPath, kind: str, options: Options) -> tuple[AnyPath, str, str | None]:
    """Returns the folder to read, its kind if it had to be detected, and the split if any.

    If splits are files of one folder, this hides the files of the others.
    """
    folders = splits.split_folders(path, options.splits)
    if folders:
        split = splits.choose(str(path), folders, options.split)
        others = [(f, listing(f).files) for name, f in folders.items() if name != split]
        read_split(folders[split], None, others)
        return folders[split], kind, split
    kind = _kind_of(str(path)) if kind == "auto" else kind
    suffixes = None if kind == "images" else _module(kind).SUFFIXES
    if suffixes == table_files.SUFFIXES:
        suffixes = table_files.suffixes_in(path)
    files = splits.split_files(path, suffixes, options.splits)
    if not files:
        if options.splits:
            raise DataError(f"--splits: nothing in {path} has such a name, got {options.splits!r}")
        return path, kind, None
    split = splits.choose(str(path), files, options.split)
    others = [(path, paths) for name, paths in files.items() if name != split]
    read_split(path, files[split], others)
    return path, kind, split


def _kind_of(location: str) -> str:
    # A dictionary by module, because a module may have several names.
    kinds: dict[str, str] = {}
    for name in _GENERAL:
        if _module(name).fits(location):
            kinds.setdefault(_MODULES[name], name)
    if len(kinds) == 1:
        return next(iter(kinds.values()))
    if not kinds and has_files(location, table_files.FALLBACK_SUFFIXES):
        return "jsonl"
    what = " and ".join(kinds.values()) or "nothing that can be packed"
    files = [storage.at(location), *listing(storage.at(location)).files]
    for file in () if kinds else files:
        if has_suffix(file, COMPRESSED):
            raise DataError(f"{file}: is compressed; unpack it first")
        if has_suffix(file, (".xls", ".xlsx", ".ods")):
            raise DataError(f"{file}: is a workbook; save its sheet as CSV UTF-8")
    raise DataError(
        f"{location}: found {what} here; choose the format with --from ({', '.join(SOURCES)})"
    )


#: Files with the bounding boxes of images, by format.
_BOXES = {
    "COCO": r"(?i).*/(instances_[^/]*|_annotations\.coco)\.json",
    "Pascal VOC": r"(?i).*/annotations/.*\.xml",
    "YOLO": r"(?i).*/labels/.*\.txt",
}


def _check_boxes(folder: AnyPath) -> None:
    """Raises `DataError` for a folder of images with bounding boxes."""
    files = [*map(str, listing(folder).files)] if _module("images").fits(str(folder)) else []
    for layout, pattern in _BOXES.items():
        if boxes := next(filter(re.compile(pattern).fullmatch, files), None):
            raise DataError(
                f"{folder}: has boxes of {layout} ({boxes}), which are not read. To pack the "
                "images alone, pass --from images; Parquet and JSON Lines may have lists of boxes"
            )


def _module(kind: str) -> Any:
    return importlib.import_module(f"pipelines.sources.{_MODULES[kind]}")
