"""Writing a folder of shards so that it is either whole or not there.

Everything is written into a hidden folder beside the destination, forced to disk, and renamed.
The rename is the only step that shows, and only one of several racing processes succeeds in it.
A killed process leaves its hidden folder (`.NAME.writing-*`) behind, which nobody reads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from pipelines.errors import DataError
from pipelines.feature import Feature
from pipelines.index import INDEX_NAME, Index, Shard, check_shards, load_index, sha256_of
from pipelines.schema import encode


class _Contents(NamedTuple):
    """What tells whether a folder already holds what is asked for."""

    source: str
    features: tuple[Feature, ...]
    num_shards: int


def write_shards(
    examples: Iterable[Mapping[str, object]],
    directory: str | Path,
    features: Sequence[Feature],
    *,
    num_shards: int,
    source: str,
) -> Index:
    """Writes examples as TFRecord shards, or re-uses the folder where it already holds them.

    Record `i` goes to shard `i % num_shards`, so shards differ by one record at most and a source
    sorted by class is spread over all of them.

    Args:
        examples: each a value per feature; consumed once, and only if there is something to write.
        directory: the folder to make; its parents are made too.
        features: of every record.
        num_shards: number of files.
        source: what the examples are and how they were made. A folder with the same source,
            features and number of shards is taken to hold the same examples.

    Returns:
        The index of the folder.

    Raises:
        DataError: an example does not fit the features, or the folder holds something else.
        ValueError: `num_shards` is below one.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards: expected at least 1, got {num_shards}")
    directory = Path(directory).absolute()
    wanted = _Contents(source, tuple(features), num_shards)
    if _holds_something(directory):
        return _reuse(directory, wanted)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _hidden_folder_beside(directory) as folder:
        shards = _write_files(examples, folder, features, num_shards)
        index = Index(source=source, features=tuple(features), shards=shards)
        (folder / INDEX_NAME).write_text(index.model_dump_json(indent=2) + "\n", "utf-8")
        # Contents reach the disk before the name does, or a power cut could show an empty file
        # under a good name.
        for path in [*folder.iterdir(), folder]:
            _sync(path)
        try:
            folder.rename(directory)  # succeeds over nothing or an empty folder only
        except OSError:
            if not _holds_something(directory):
                raise
            return _reuse(directory, wanted)  # another process was first
    _sync(directory.parent)
    return index


def _reuse(directory: Path, wanted: _Contents) -> Index:
    if not (directory / INDEX_NAME).exists():
        raise DataError(
            f"{directory}: expected a new or empty folder, or one with an index, found other files "
            "in it; name another folder"
        )
    index = load_index(directory)
    found = _Contents(index.source, index.features, len(index.shards))
    for what in _Contents._fields:
        expected, came = getattr(wanted, what), getattr(found, what)
        if came != expected:
            raise DataError(
                f"{directory}: holds other data: {what}: expected {expected}, found {came}; "
                "delete the folder or name another one"
            )
    check_shards(directory, index.shards)
    return index


def _write_files(
    examples: Iterable[Mapping[str, object]],
    folder: Path,
    features: Sequence[Feature],
    num_shards: int,
) -> tuple[Shard, ...]:
    names = [f"data-{i:05d}-of-{num_shards:05d}.tfrecord" for i in range(num_shards)]
    counts = [0] * num_shards
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(tf.io.TFRecordWriter(str(folder / name))) for name in names]
        for example, i in zip(examples, itertools.cycle(range(num_shards)), strict=False):
            writers[i].write(encode(example, features))
            counts[i] += 1
    paths = [folder / name for name in names]
    return tuple(
        Shard(name=p.name, num_records=n, num_bytes=p.stat().st_size, sha256=sha256_of(p))
        for p, n in zip(paths, counts, strict=True)
    )


@contextlib.contextmanager
def _hidden_folder_beside(directory: Path) -> Iterator[Path]:
    """A new folder on the same file system, removed at the end if it is still there."""
    folder = directory.with_name(f".{directory.name}.writing-{uuid.uuid4().hex}")
    folder.mkdir()  # tempfile.mkdtemp would let in nobody else, and the mode outlives the rename
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _holds_something(directory: Path) -> bool:
    return directory.exists() and any(directory.iterdir())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
