"""The index of a folder of shards (`index.json`), and the checks of the shards against it.

`python -m pipelines.index DIR` creates the index of shards that other tools wrote.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_validator

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.format.record_file import Compression
from pipelines.storage import AnyPath

INDEX_NAME = "index.json"
#: Bytes that are hashed at a time.
_HASH_BYTES = 1 << 20
_CURE = "restore it, or write the data again to another folder"


class Shard(BaseModel):
    """One TFRecord file: its name in the folder, number of records, size in bytes and SHA-256.

    Example:
        >>> pipelines.load_index("data/digits").shards[0].name
        'data-00000-of-00004.tfrecord'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    num_records: NonNegativeInt
    num_bytes: NonNegativeInt
    sha256: str

    @field_validator("name")
    @classmethod
    def _is_inside(cls, name: str) -> str:
        """Rejects files outside of the folder, because an index may come from someone else."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"expected the name of a file inside the folder, got {name!r}")
        return name


class Index(BaseModel):
    """The contents of a folder of shards.

    Example:
        >>> pipelines.load_index("data/digits").num_shards
        4

    Attributes:
        version: Version of this format.
        source: A description by the writer of the source of the records. It identifies the data:
            two folders with the same source, features and shards hold the same records.
        features: The features of every record.
        compression: Compression of every shard, by TensorFlow's name; empty for none.
        shards: The shards, in the order of unshuffled reading.
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
        """Rejects a file that is listed twice, whose records would be read twice per epoch."""
        counts = Counter(str(PurePosixPath(shard.name)) for shard in shards)
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"{repeated[0]!r} is listed {counts[repeated[0]]} times")
        return shards

    @property
    def num_records(self) -> int:
        """Number of records in all shards."""
        return sum(shard.num_records for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Size of all shards in bytes."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)


def load_index(directory: str | AnyPath) -> Index:
    """Reads the index of a folder.

    Example:
        >>> index = pipelines.load_index("data/digits")
        >>> [feature.name for feature in index.features]
        ['image', 'label']

    Raises:
        DataError: The folder has no index, or the file is not an index.
    """
    path = storage.at(directory) / INDEX_NAME
    try:
        return Index.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path}: expected the index of a folder of shards, found no such file; check the "
            "path, or create the index of existing shards with python -m pipelines.index"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        problem = first["msg"].removeprefix("Value error, ")
        raise DataError(
            f"{path}: not an index of this version: {where}: {problem}; restore this file, or "
            f"delete it and create it again: python -m pipelines.index {directory}"
        ) from None


def check_shards(
    directory: str | AnyPath, shards: Iterable[Shard], *, checksums: bool = False
) -> None:
    """Checks that files exist and have the sizes, and optionally the SHA-256, of the index.

    Raises:
        DataError: A file is missing or differs; the message names the first one.
    """
    folder = storage.at(directory)
    # One listing instead of a request per shard.
    listed = None if isinstance(folder, Path) else folder.sizes()
    for shard in shards:
        path = folder / shard.name
        try:
            num_bytes = (
                storage.num_bytes(path)
                if listed is None
                else listed[str(PurePosixPath(shard.name))]
            )
        except (FileNotFoundError, KeyError):
            raise DataError(
                f"{path}: the index lists this shard, but the file is missing; {_CURE}"
            ) from None
        if num_bytes != shard.num_bytes:
            raise DataError(f"{path}: expected {shard.num_bytes} bytes, found {num_bytes}; {_CURE}")
        if checksums and (actual := sha256_of(path)) != shard.sha256:
            raise DataError(
                f"{path}: expected SHA-256 {shard.sha256[:12]}..., found {actual[:12]}...; {_CURE}"
            )


def sha256_of(path: AnyPath) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_HASH_BYTES):
            digest.update(data)
    return digest.hexdigest()
