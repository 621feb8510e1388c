"""`Source`: the interface of data formats. Examples can be read in any order and process."""

from __future__ import annotations

import abc
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pipelines.errors import DataError
from pipelines.format.feature import Feature

Example = Mapping[str, object]


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

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abc.abstractmethod
    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        """Yields the examples with these numbers, in this order.

        Raises:
            DataError: An example cannot be read; the message names the file.
        """


def fingerprint(paths: Iterable[Path], root: Path, *, contents: bool = False) -> str:
    """Returns a hash of the names, sizes and times of files, or of their names and contents."""
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        mark = str(status.st_mtime_ns)
        if contents:
            with path.open("rb") as file:
                mark = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{os.path.relpath(path, root)}\0{status.st_size}\0{mark}\n".encode())
    return digest.hexdigest()[:16]


def files_below(folder: Path, suffixes: Collection[str] | None = None) -> list[Path]:
    """Returns all files with one of the suffixes, without hidden files, in sorted order."""
    found = []
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            wanted = suffixes is None or Path(name).suffix.lower() in suffixes
            if wanted and not name.startswith("."):
                found.append(Path(directory, name))
    return sorted(found)


def class_names(paths: Iterable[Path], folder: Path) -> tuple[str, ...]:
    """Returns the sorted names of class subfolders, or none if all files are in the folder itself.

    Raises:
        DataError: Some files are in the folder itself and others in subfolders.
    """
    names, loose = set(), None
    for path in paths:
        parts = path.relative_to(folder).parts
        if len(parts) > 1:
            names.add(parts[0])
        else:
            loose = path
    if names and loose:
        raise DataError(f"{loose}: has no class; move it to one of the class folders")
    return tuple(sorted(names))
