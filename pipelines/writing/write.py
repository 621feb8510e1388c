"""`write_shards`: writes a folder of shards from Python, record by record and atomically.

A killed process leaves its hidden folder (`.NAME.writing-*`) behind, which is never read. The next
writer on that host removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pipelines import storage
from pipelines.format import offsets
from pipelines.format.encoding import encode
from pipelines.format.feature import Feature
from pipelines.format.index import Index
from pipelines.storage import AnyPath, RemotePath
from pipelines.writing.publish import (
    ShardWriter,
    existing_index,
    explain_full_disk,
    publish,
    shard_name,
    write_index,
)


def write_shards(
    examples: Iterable[Mapping[str, object]],
    directory: str | AnyPath,
    features: Sequence[Feature],
    *,
    num_shards: int,
    source: str,
) -> Index:
    """Writes examples as TFRecord shards, unless the folder already contains them.

    Record `i` goes to shard `i % num_shards`. So the sizes of shards differ by at most one record,
    and a source that is sorted by class is spread over all of them.

    Example:
        >>> features = [
        ...     pipelines.Feature(name="image", dtype="float64", shape=(64,)),
        ...     pipelines.Feature(name="label", dtype="int64", encoding="list"),
        ... ]
        >>> examples = ({"image": image, "label": label} for image, label in zip(x, y))
        >>> index = pipelines.write_shards(
        ...     examples, "data/digits", features, num_shards=4, source="scikit-learn digits"
        ... )
        >>> index.num_records
        1797

    Args:
        examples: One mapping from feature names to values per example. They are consumed once, and
            not at all if the folder exists already.
        directory: The folder to create, with its parents, or its URL.
        features: The features of every record.
        num_shards: Number of files.
        source: Description of the examples and how they were made. An existing folder with the same
            source, features and number of shards counts as the same data.

    Returns:
        The index of the folder.

    Raises:
        DataError: An example does not match the features, the folder contains other data, or the
            disk is full.
        ValueError: `num_shards` is less than one.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards: expected at least 1, got {num_shards}")
    directory = storage.at(directory)
    features = tuple(features)
    attributes = {"source": source, "features": features, "num_shards": num_shards}
    if existing := existing_index(directory, attributes):
        return existing
    if isinstance(directory, RemotePath):
        index, table = _write_files(examples, directory, features, num_shards, source)
        offsets.store(directory, index, table)
        # The index makes the shards a data set. A later writer replaces it with the same data.
        write_index(directory, index)
        return index
    directory = directory.absolute()
    with explain_full_disk(directory, "try again"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _hidden_folder_beside(directory) as folder:
            index, table = _write_files(examples, folder, features, num_shards, source)
            return publish(folder, directory, index, attributes, table)


def _write_files(
    examples: Iterable[Mapping[str, object]],
    folder: AnyPath,
    features: tuple[Feature, ...],
    num_shards: int,
    source: str,
) -> tuple[Index, np.ndarray]:
    """Writes the shards; returns their index and the offset of each record."""
    paths = [folder / shard_name(i, num_shards) for i in range(num_shards)]
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(ShardWriter(path, num_open=num_shards)) for path in paths]
        for example, writer in zip(examples, itertools.cycle(writers), strict=False):
            writer.write(encode(example, features))
    shards = tuple(writer.shard for writer in writers)
    table = np.concatenate([np.array(writer.offsets, np.int64) for writer in writers])
    return Index(source=source, features=features, shards=shards), table


@contextlib.contextmanager
def _hidden_folder_beside(directory: Path) -> Iterator[Path]:
    """Creates a folder on the same file system and removes it at the end if it still exists.

    Such folders of killed processes of this host, whose locks are free, are removed, too.
    """
    prefix = f".{directory.name}.writing-{socket.gethostname()}-"
    for left in directory.parent.glob(f"{glob.escape(prefix)}*"):
        with _locked(left) as is_free:
            if is_free:
                shutil.rmtree(left, ignore_errors=True)
    suffix = uuid.uuid4().hex
    folder = directory.with_name(f".{directory.name}.{suffix}")
    folder.mkdir()  # tempfile.mkdtemp would set a private mode, which the final folder would keep
    try:
        with _locked(folder):
            # Other processes look for this name only, so that they never see it without its lock.
            folder = folder.rename(directory.with_name(prefix + suffix))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Locks a folder within the block, until the process ends for any reason."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
