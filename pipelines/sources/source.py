"""What every source is: examples that can be made one by one, in any order, in any process."""

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
    """What a user can say about a source; None, False and () leave it to the source."""

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
        """Those that were given."""
        return {name: value for name, value in self if value not in (None, False, ())}

    def check(self, source: str, known: Collection[str]) -> None:
        """Refuses options that the source would ignore.

        Raises:
            DataError: names the first of them.
        """
        for name in self.given():
            if name not in known:
                flags = ", ".join(f"--{k.replace('_', '-')}" for k in sorted(known)) or "none"
                raise DataError(
                    f"--{name.replace('_', '-')}: does not apply to {source}, which takes {flags}"
                )


class Source(abc.ABC):
    """Examples by their number. Instances are pickled into the worker processes.

    Attributes:
        features: of every example.
        description: what the examples are, for the index. It differs whenever they would.
    """

    features: tuple[Feature, ...]
    description: str

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abc.abstractmethod
    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        """Makes the examples of these numbers, in their order.

        Raises:
            DataError: one cannot be read; names the file.
        """


def fingerprint(paths: Iterable[Path], root: Path, *, contents: bool = False) -> str:
    """Tells sets of files apart, by names, sizes and times, or by names and contents."""
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
    """All files with one of the suffixes, hidden ones left out, in an order that never changes."""
    found = []
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            wanted = suffixes is None or Path(name).suffix.lower() in suffixes
            if wanted and not name.startswith("."):
                found.append(Path(directory, name))
    return sorted(found)


def class_names(paths: Iterable[Path], folder: Path) -> tuple[str, ...]:
    """The subfolders that hold the files, sorted; none if all lie in the folder itself.

    Raises:
        DataError: some lie in the folder itself and some in subfolders.
    """
    names, loose = set(), None
    for path in paths:
        parts = path.relative_to(folder).parts
        if len(parts) > 1:
            names.add(parts[0])
        else:
            loose = path
    if names and loose:
        raise DataError(
            f"{loose}: lies beside class folders, so it has no class; move it into one of them"
        )
    return tuple(sorted(names))
