"""`Source`: the interface of data formats. Examples can be read in any order and process."""

from __future__ import annotations

import abc
import functools
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.storage import AnyPath, RemotePath

Example = Mapping[str, object]

#: Names of folders that hold a part of the data each, and no class.
_SPLITS = frozenset({"train", "validation", "val", "valid", "test"})


class Options(BaseModel):
    """Options of sources. None, False and () mean that an option is not given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    split: str | None = None
    data_dir: str | None = None
    label: str | None = None
    fill: tuple[str, ...] = ()
    drop_gaps: bool = False
    whole_files: bool = False
    image_format: Literal["jpeg", "png"] | None = None
    image_size: str | None = None
    quality: int | None = None
    channels: int | None = None
    column: tuple[str, ...] = ()
    encoding: str | None = None
    delimiter: str | None = None
    quote: str | None = None

    def given(self) -> dict[str, object]:
        """Returns the options that were given."""
        return {name: value for name, value in self if value not in (None, False, ())}

    def check(self, source: str, known: Collection[str]) -> None:
        """Checks that no option is given that the source would ignore.

        Raises:
            DataError: An option does not apply.
        """
        for name in self.given():
            if name not in known:
                flags = ", ".join(f"--{k.replace('_', '-')}" for k in sorted(known)) or "none"
                raise DataError(
                    f"--{name.replace('_', '-')}: does not apply to {source}, which accepts {flags}"
                )


class Source(abc.ABC):
    """Examples that are read by their numbers. Instances are pickled to the worker processes.

    Attributes:
        features: Features of every example.
        description: Description of the examples for the index, which differs if the examples do.
    """

    features: tuple[Feature, ...]
    description: str

    def __getstate__(self) -> dict[str, object]:
        """Leaves out cached properties, which every worker process computes itself."""
        kept = vars(self).items()
        return {name: value for name, value in kept if not _is_cached(type(self), name)}

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abc.abstractmethod
    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        """Yields the examples with these numbers, in this order.

        Raises:
            DataError: An example cannot be read; the message names the file.
        """


def _is_cached(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), functools.cached_property)


def fingerprint(paths: Sequence[AnyPath], root: AnyPath, *, contents: bool = False) -> str:
    """Returns a hash of the names, sizes and times of files, or of their names and contents.

    In an object store, the mark of an object stands for its time and contents.
    """
    digest = hashlib.sha256()
    for path in paths:
        if isinstance(path, RemotePath):
            name = str(storage.relative(path, root))
            found = path.mark() if len(paths) == 1 else _listing(cast(RemotePath, root))[name]
            digest.update(f"{name}\0{found}\n".encode())
            continue
        status = path.stat()
        mark = str(status.st_mtime_ns)
        if contents:
            with path.open("rb") as file:
                mark = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{os.path.relpath(path, str(root))}\0{status.st_size}\0{mark}\n".encode())
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def _listing(folder: RemotePath) -> Mapping[str, tuple[int, str]]:
    """Returns the objects of a folder, as `RemotePath.files` does. It is listed only once."""
    return folder.files()


def list_again() -> None:
    """Forgets which objects a folder has."""
    _listing.cache_clear()


def is_folder(path: AnyPath) -> bool:
    """Returns whether there is a folder at a path, without a request if it was listed."""
    return path.is_dir() if isinstance(path, Path) else bool(_listing(path))


def has_files(location: str, suffixes: Collection[str]) -> bool:
    """Returns whether a location is a file with one of the suffixes, or a folder of such files."""
    path = storage.at(location)
    return bool(files_below(path, suffixes)) if is_folder(path) else path.suffix in suffixes


def files_below(folder: AnyPath, suffixes: Collection[str] | None = None) -> list[Any]:
    """Returns all files with one of the suffixes, without hidden files, in sorted order."""
    if isinstance(folder, RemotePath):
        names = [
            name
            for name in _listing(folder)
            if not any(part.startswith(".") for part in name.split("/"))
            and (suffixes is None or PurePosixPath(name).suffix.lower() in suffixes)
        ]
        return [folder / name for name in sorted(names)]
    found = []
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            wanted = suffixes is None or Path(name).suffix.lower() in suffixes
            if wanted and not name.startswith("."):
                found.append(Path(directory, name))
    return sorted(found)


def class_names(paths: Iterable[AnyPath], folder: AnyPath) -> tuple[str, ...]:
    """Returns the sorted names of class subfolders, or none if all files are in the folder itself.

    Raises:
        DataError: Some files are in the folder itself and others in subfolders, or the subfolders
            are splits that contain class folders.
    """
    names, loose, depth = set(), None, 0
    for path in paths:
        parts = storage.relative(path, folder).parts
        depth = max(depth, len(parts))
        if len(parts) > 1:
            names.add(parts[0])
        else:
            loose = path
    if names and loose:
        raise DataError(f"{loose}: has no class; move it to one of the class folders")
    if "train" in names and names <= _SPLITS and depth > 2:
        raise DataError(
            f"{folder}: contains the splits {', '.join(sorted(names))} and not classes; pack each "
            f"one: python -m pipelines.pack {folder / 'train'} DEST/train, and so on"
        )
    return tuple(sorted(names))
