"""Making the index of shards that others wrote: every record is read once, in parallel."""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pipelines.console import parallel_tasks
from pipelines.errors import DataError
from pipelines.format import record_file
from pipelines.format.compression import Compression
from pipelines.format.feature import Feature
from pipelines.format.index import Index, Shard, sha256_of
from pipelines.index import infer, tfds_metadata

_OF_SHARDS = re.compile(r"(\d+)-of-(\d+)")
_NUM_BETWEEN_REPORTS = 100


class _File(NamedTuple):
    """One file to look through, and the name that the index gives it."""

    path: Path
    name: str
    compression: Compression


@dataclass
class _Contents:
    """What was found in one file."""

    shard: Shard
    seen: dict[str, infer.Seen] = field(default_factory=dict)


def make_index(
    files: Sequence[Path], directory: Path, declared: Sequence[Feature], num_workers: int
) -> Index:
    """Looks through shards and says what they hold.

    Args:
        files: the shards, of one data set.
        directory: where the index will lie.
        declared: features that the user knows better than the records tell.
        num_workers: processes that read.

    Returns:
        The index; it is not written yet.

    Raises:
        DataError: a file or record is damaged, is no TFRecord or no `tf.train.Example`, shards are
            missing or of different data sets, or a declared feature is not in them.
    """
    _check_complete(files)
    compressions = {path: record_file.compression_of(path) for path in files if path.stat().st_size}
    if len(set(compressions.values())) > 1:
        raise DataError(f"{files[0].parent}: files of several compressions; choose with --files")
    compression: Compression = next(iter(compressions.values()), "")
    tasks = [_File(path, _name(path, directory), compression) for path in files]
    contents = parallel_tasks.run(
        _look_through,
        tasks,
        num_workers=num_workers,
        description=f"reading {len(tasks)} files",
        num_records=None,
    )
    shards = tuple(found.shard for found in contents)
    digest = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()[:16]
    return Index(
        source=f"TFRecord files {digest}",
        features=_features(contents, files[0].parent, declared),
        compression=compression,
        shards=shards,
    )


def link_outside(index: Index, files: Sequence[Path], directory: Path) -> None:
    """Creates symbolic links in the folder of an index to the shards that are not in it.

    An index lists files of its own folder alone, so that one from elsewhere cannot name others.

    Raises:
        DataError: the name of a link is taken.
    """
    for shard, path in zip(index.shards, files, strict=True):
        link = directory / shard.name
        if link.exists() and link.samefile(path):
            continue
        try:
            link.symlink_to(os.path.relpath(path.resolve(), directory.resolve()))
        except FileExistsError:
            raise DataError(f"{link}: exists already; use another folder for --to") from None


def _name(path: Path, directory: Path) -> str:
    """Returns the name of a shard in an index: its path in the folder, or that of a link there."""
    path = path.resolve()
    return str(path.relative_to(directory)) if path.is_relative_to(directory) else path.name


def _check_complete(files: Sequence[Path]) -> None:
    """Compares the files with what their names tell of how many and of what there should be."""
    sets = defaultdict(list)
    for path in files:
        sets[re.sub(r"\d+", "*", path.name)].append(path)
    if len(sets) > 1:
        raise DataError(
            f"{files[0].parent}: expected the shards of one data set, found {', '.join(sets)}; "
            "choose with --files, and --to for an index of each"
        )
    for path in files:
        if (match := _OF_SHARDS.search(path.name)) and int(match[2]) != len(files):
            raise DataError(
                f"{path}: one of {int(match[2])} shards by its name, found {len(files)}; get the "
                "missing ones, or choose with --files"
            )


def _look_through(file: _File, advance: parallel_tasks.Advance) -> _Contents:
    from pipelines.format.example_check import parsed  # imports TensorFlow

    num_records, seen = 0, dict[str, infer.Seen]()
    for record in record_file.sound_records(file.path, file.compression):
        infer.add_example(seen, parsed(record.data, f"{file.path}: record at byte {record.offset}"))
        num_records += 1
        if num_records % _NUM_BETWEEN_REPORTS == 0:
            advance(_NUM_BETWEEN_REPORTS)
    advance(num_records % _NUM_BETWEEN_REPORTS)
    shard = Shard(
        name=file.name,
        num_records=num_records,
        num_bytes=file.path.stat().st_size,
        sha256=sha256_of(file.path),
    )
    return _Contents(shard, seen)


def _features(
    contents: Sequence[_Contents], folder: Path, declared: Sequence[Feature]
) -> tuple[Feature, ...]:
    seen: dict[str, infer.Seen] = {}
    for found in contents:
        infer.merge(seen, found.seen)
        for name, of_feature in seen.items():
            if len(of_feature.kinds) > 1:
                kinds = " and ".join(sorted(of_feature.kinds))
                raise DataError(
                    f"{found.shard.name}: feature {name!r} is {kinds} in different records; a "
                    "feature has one type"
                )
    num_records = sum(found.shard.num_records for found in contents)
    features = {name: seen[name].feature(name, num_records) for name in sorted(seen)}
    features = tfds_metadata.refine(features, folder)
    for feature in declared:
        if feature.name not in features:
            raise DataError(f"--features: {feature.name!r} is in no record; found {list(features)}")
        features[feature.name] = feature
    return tuple(features.values())
