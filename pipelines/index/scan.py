"""Creates the index of existing shards by reading every record once, in parallel."""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from pipelines import storage
from pipelines.console import parallel_tasks
from pipelines.errors import DataError
from pipelines.format import record_file
from pipelines.format.encoding import parse_message
from pipelines.format.feature import Feature
from pipelines.format.index import Index, Shard, sha256_of
from pipelines.format.record_file import Compression
from pipelines.index import infer
from pipelines.storage import AnyPath, RemotePath

_OF_SHARDS = re.compile(r"(\d+)-of-(\d+)")
_NUM_BETWEEN_REPORTS = 100


class _File(NamedTuple):
    """One file to scan, and its name in the index."""

    path: AnyPath
    name: str
    compression: Compression


@dataclass
class _Contents:
    """The result of scanning one file.

    Attributes:
        shard: Description of the file.
        offsets: Offset of each record in the uncompressed file.
        seen: Statistics of each feature.
    """

    shard: Shard
    offsets: np.ndarray
    seen: dict[str, infer.FeatureStatistics] = field(default_factory=dict)


def make_index(
    files: Sequence[AnyPath], directory: AnyPath, declared: Sequence[Feature], num_workers: int
) -> tuple[Index, np.ndarray]:
    """Scans shards and returns their index and the offsets of their records.

    Args:
        files: The shards of one data set.
        directory: The folder of the index.
        declared: Features declared by the user, which replace the inferred ones.
        num_workers: Number of processes that read.

    Returns:
        The index, and the offset of each record in its uncompressed file, shard by shard. Nothing
        is written yet.

    Raises:
        DataError: A file or record is damaged or is not a TFRecord or `tf.train.Example`, shards
            are missing or belong to different data sets, or a declared feature does not exist.
    """
    _check_complete(files)
    compressions = {*storage.in_order(_compression, files, directory)} - {None}
    if len(compressions) > 1:
        raise DataError(
            f"{files[0].parent}: the files have different compressions; select files with --files"
        )
    compression: Compression = next(filter(None, compressions), "")
    tasks = [_File(path, _name(path, directory), compression) for path in files]
    contents = parallel_tasks.run(
        _scan_file,
        tasks,
        num_workers=num_workers,
        description=f"reading {len(tasks)} files",
        num_records=None,
    )
    shards = tuple(content.shard for content in contents)
    digest = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()[:16]
    index = Index(
        source=f"TFRecord files {digest}",
        features=_features(contents, files[0].parent, declared),
        compression=compression,
        shards=shards,
    )
    return index, np.concatenate([content.offsets for content in contents])


def link_shards(index: Index, files: Sequence[AnyPath], directory: AnyPath) -> None:
    """Creates symbolic links in the folder of an index to shards outside of it.

    An index may list only files of its own folder, for security. A bucket has no links: there, the
    shards are copied within the bucket.

    Raises:
        DataError: A file with the name of the link exists already.
    """
    for shard, path in zip(index.shards, files, strict=True):
        if isinstance(path, RemotePath) or isinstance(directory, RemotePath):
            copy = cast(RemotePath, directory / shard.name)
            if path != copy:
                cast(RemotePath, path).copy_to(copy)
            continue
        link = directory / shard.name
        if link.exists() and link.samefile(path):
            continue
        try:
            link.symlink_to(os.path.relpath(path.resolve(), directory.resolve()))
        except FileExistsError:
            raise DataError(f"{link}: exists already; choose another folder with --to") from None


def _name(path: AnyPath, directory: AnyPath) -> str:
    """Returns the name of a shard in an index: its path in the folder, or that of a link there."""
    if isinstance(path, RemotePath) or isinstance(directory, RemotePath):
        return path.name
    path, directory = path.resolve(), directory.resolve()
    return str(path.relative_to(directory)) if path.is_relative_to(directory) else path.name


def _check_complete(files: Sequence[AnyPath]) -> None:
    """Checks by the file names that the shards are complete and belong to one data set."""
    sets = defaultdict(list)
    for path in files:
        sets[re.sub(r"\d+", "*", path.name)].append(path)
    if len(sets) > 1:
        raise DataError(
            f"{files[0].parent}: expected the shards of one data set, found {', '.join(sets)}; "
            "select one with --files, and a folder for its index with --to"
        )
    for path in files:
        if (match := _OF_SHARDS.search(path.name)) and int(match[2]) != len(files):
            raise DataError(
                f"{path}: expected {int(match[2])} shards by its name, found {len(files)}; get the "
                "missing shards, or select files with --files"
            )


def _compression(path: AnyPath) -> Compression | None:
    """Returns the compression of a file, or None for an empty file."""
    return record_file.compression_of(path) if storage.num_bytes(path) else None


def _scan_file(file: _File, advance: parallel_tasks.Advance) -> _Contents:
    offsets: list[int] = []
    seen: dict[str, infer.FeatureStatistics] = {}
    for record in record_file.intact_records(file.path, file.compression):
        infer.add_example(
            seen, parse_message(record.data, f"{file.path}: record at byte {record.offset}")
        )
        offsets.append(record.offset)
        if len(offsets) % _NUM_BETWEEN_REPORTS == 0:
            advance(_NUM_BETWEEN_REPORTS)
    advance(len(offsets) % _NUM_BETWEEN_REPORTS)
    shard = Shard(
        name=file.name,
        num_records=len(offsets),
        num_bytes=storage.num_bytes(file.path),
        sha256=sha256_of(file.path),
    )
    return _Contents(shard, np.array(offsets, np.int64), seen)


def _features(
    contents: Sequence[_Contents], folder: AnyPath, declared: Sequence[Feature]
) -> tuple[Feature, ...]:
    seen: dict[str, infer.FeatureStatistics] = {}
    for content in contents:
        infer.merge(seen, content.seen)
        for name, of_feature in seen.items():
            if len(of_feature.kinds) > 1:
                kinds = " and ".join(sorted(of_feature.kinds))
                raise DataError(
                    f"{content.shard.name}: feature {name!r} is {kinds} in different records; a "
                    "feature must have the same type in all records"
                )
    num_records = sum(content.shard.num_records for content in contents)
    features = {name: seen[name].feature(name, num_records) for name in sorted(seen)}
    features = infer.refine_with_tfds_metadata(features, folder)
    for feature in declared:
        if feature.name not in features:
            raise DataError(
                f"--features: no record has {feature.name!r}; the records have {list(features)}"
            )
        features[feature.name] = feature
    return tuple(features.values())
