"""What a folder of shards holds: the index written beside them, and the checks against it.

`python -m pipelines.index DIR` makes the index of shards that others wrote.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_validator

from pipelines.errors import DataError
from pipelines.format.compression import Compression
from pipelines.format.feature import Feature

INDEX_NAME = "index.json"
_CURE = "restore it, or write the data again into another folder"


class Shard(BaseModel):
    """One TFRecord file: its name inside the folder, number of records, size in bytes, SHA-256."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    num_records: NonNegativeInt
    num_bytes: NonNegativeInt
    sha256: str

    @field_validator("name")
    @classmethod
    def _is_inside(cls, name: str) -> str:
        """Refuses files outside of the folder: an index may come from somebody else."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"expected the name of a file inside the folder, got {name!r}")
        return name


class Index(BaseModel):
    """A folder's contents.

    Attributes:
        version: of this layout.
        source: what the records were made from and how, in the writer's words. It tells data of
            the same features apart, so it changes whenever the records would.
        features: of every record.
        compression: of every shard, as TensorFlow names it; empty for none.
        shards: in the order of unshuffled reading.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    source: str
    features: tuple[Feature, ...]
    compression: Compression = ""
    shards: tuple[Shard, ...]

    @field_validator("shards")
    @classmethod
    def _are_distinct(cls, shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
        """Refuses a file that is listed twice: its records would come twice in an epoch."""
        counts = Counter(str(PurePosixPath(shard.name)) for shard in shards)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"{repeated[0]!r} is listed {counts[repeated[0]]} times")
        return shards

    @property
    def num_records(self) -> int:
        """Records over all shards."""
        return sum(shard.num_records for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes over all shards."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)


def load_index(directory: str | Path) -> Index:
    """Reads the index of a folder.

    Raises:
        DataError: there is none, or it is not an index.
    """
    path = Path(directory) / INDEX_NAME
    try:
        return Index.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{path}: expected the index of a folder of shards, found no such file; check "
            "the path, or make the index of shards that others wrote: python -m pipelines.index"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        problem = first["msg"].removeprefix("Value error, ")
        raise DataError(
            f"{path}: not an index of this version: {where}: {problem}; restore this file, or "
            f"delete it alone and make it anew: python -m pipelines.index {directory}"
        ) from None


def check_shards(
    directory: str | Path, shards: Iterable[Shard], *, checksums: bool = False
) -> None:
    """Compares files with the index: that they exist and their sizes, or also every byte.

    Args:
        directory: where the files lie.
        shards: those to check.
        checksums: read the files whole and compare SHA-256 too.

    Raises:
        DataError: names the first file that is missing or differs.
    """
    for shard in shards:
        path = Path(directory) / shard.name
        try:
            num_bytes = path.stat().st_size
        except FileNotFoundError:
            raise DataError(
                f"{path}: the index lists this shard, but the file is missing; {_CURE}"
            ) from None
        if num_bytes != shard.num_bytes:
            raise DataError(f"{path}: expected {shard.num_bytes} bytes, found {num_bytes}; {_CURE}")
        if checksums and (found := sha256_of(path)) != shard.sha256:
            raise DataError(
                f"{path}: expected SHA-256 {shard.sha256[:12]}..., found {found[:12]}...; {_CURE}"
            )


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
