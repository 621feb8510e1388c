"""Writes folders of TFRecord shards, which appear atomically; `write_shards` does so from Python.

Shards are written to a hidden folder beside the destination, flushed to disk, and renamed. Only the
rename is visible, and of several competing processes only one succeeds. A killed process leaves its
hidden folder (`.NAME.writing-*`) behind, which is never read. The next writer on that host removes
it. Does not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import itertools
import os
import re
import shutil
import socket
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format import offsets
from pipelines.format.encoding import encode
from pipelines.format.feature import Feature
from pipelines.format.index import INDEX_NAME, Index, Shard, check_shards, load_index
from pipelines.format.record_file import Compression, frame
from pipelines.storage import AnyPath, RemotePath

#: Folder in a destination in an object store that describes shards before there is an index.
PACKING = ".packing"
#: Names of files that an interrupted packing leaves in a destination without an index.
LEFTOVERS = re.compile(r"data-\d+-of-\d+\.tfrecord|\.packing/.*|offsets\.npz|account\.json")
#: Size at which collected records are hashed and written.
_CHUNK_BYTES = 1 << 20


def shard_name(number: int, num_shards: int) -> str:
    """Returns the file name of a shard. The names sort in the order of the numbers."""
    return f"data-{number:05d}-of-{num_shards:05d}.tfrecord"


class ShardWriter:
    """Context manager that writes records to a new file. The same records give the same bytes.

    On exit without an error the file is complete and flushed to disk, and `shard` describes it.

    Args:
        path: The file.
        compression: Its compression.
        num_open: Number of files that are written at the same time.

    Attributes:
        shard: Description of the complete file.
        offsets: Offset of each record in the uncompressed file.
    """

    shard: Shard

    def __init__(self, path: AnyPath, compression: Compression = "", num_open: int = 1) -> None:
        self._path = path
        self._file = path.open("wb") if isinstance(path, Path) else path.open_upload(num_open)
        # zlib's gzip header has no time and no name, so that equal data give equal files.
        bits = {"GZIP": zlib.MAX_WBITS | 16, "ZLIB": zlib.MAX_WBITS}.get(compression)
        self._compressor = zlib.compressobj(wbits=bits) if bits else None
        self._hash = hashlib.sha256()
        self._chunk: list[bytes] = []
        self._chunk_bytes = self._num_bytes = 0
        self.offsets: list[int] = []
        self._end = 0

    def write(self, data: bytes) -> None:
        """Appends one record."""
        framed = frame(data)
        self._chunk.append(framed)
        self._chunk_bytes += len(framed)
        self.offsets.append(self._end)
        self._end += len(framed)
        if self._chunk_bytes >= _CHUNK_BYTES:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:  # this discards the upload of a remote file
            self._file.__exit__(kind, error, traceback)
            return
        with self._file:
            self._flush()
            if self._compressor:
                self._put(self._compressor.flush())
            if isinstance(self._path, Path):
                self._file.flush()
                os.fsync(self._file.fileno())
        self.shard = Shard(
            name=self._path.name,
            num_records=len(self.offsets),
            num_bytes=self._num_bytes,
            sha256=self._hash.hexdigest(),
        )

    def _flush(self) -> None:
        data = b"".join(self._chunk)
        self._chunk, self._chunk_bytes = [], 0
        self._put(self._compressor.compress(data) if self._compressor else data)

    def _put(self, data: bytes) -> None:
        self._hash.update(data)
        self._num_bytes += len(data)
        self._file.write(data)


@contextlib.contextmanager
def explain_full_disk(directory: AnyPath, then: str) -> Iterator[None]:
    """Converts the error of a full disk to a `DataError` with a fix."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(f"{directory}: {error.strerror}; free some space and {then}") from None


def existing_index(directory: AnyPath, expected_attributes: Mapping[str, object]) -> Index | None:
    """Returns the index of a folder if it exists already and contains the expected data.

    Args:
        directory: The folder.
        expected_attributes: Expected attributes of the index by name.

    Returns:
        The index, or None if the folder is missing or empty.

    Raises:
        DataError: The folder contains something else, or is a file.
    """
    if isinstance(directory, Path) and directory.is_file():
        raise DataError(f"{directory}: expected a folder, found a file; choose another path")
    if not _is_occupied(directory):
        return None
    if not (directory / INDEX_NAME).is_file():
        raise DataError(
            f"{directory}: expected a new or empty folder, or one with an index, found other "
            "files; choose another folder"
        )
    index = load_index(directory)
    for name, expected in expected_attributes.items():
        if (actual := getattr(index, name)) != expected:
            raise DataError(
                f"{directory}: contains other data: {name}: expected {expected}, found {actual}; "
                "choose another folder"
            )
    check_shards(directory, index.shards)
    return index


def publish(
    folder: Path,
    directory: Path,
    index: Index,
    expected_attributes: Mapping[str, object],
    table: np.ndarray | None = None,
) -> Index:
    """Completes a folder of shards with its index and offsets, and renames it to its final name.

    Args:
        folder: The folder of the shards, on the same file system as `directory`.
        directory: The final name.
        index: The index of the shards.
        expected_attributes: What a competing process's folder must contain; see `existing_index`.
        table: The offset of each record; None: the shards are scanned.

    Returns:
        The index of the published folder, which another process may have published first.

    Raises:
        DataError: Another process published a folder with other data.
    """
    try:
        if not index.compression:
            # The first reader would have to scan the shards, in a bucket by downloading them.
            offsets.store(folder, index, offsets.scan(folder, index) if table is None else table)
        write_index(folder, index)
        # The contents must reach the disk before the name does. Otherwise a power failure could
        # leave empty files under the final name.
        storage.flush(folder)
        folder.rename(directory)  # succeeds only if the name is free or an empty folder
    except OSError:
        if existing := existing_index(directory, expected_attributes):
            return existing
        raise
    storage.sync(directory.parent)
    return index


def write_index(folder: AnyPath, index: Index) -> None:
    """Writes or replaces the index of a folder atomically."""
    if isinstance(folder, RemotePath):
        (folder / INDEX_NAME).write_bytes(index_json(index))
        return
    write_atomically(folder / INDEX_NAME, index_json(index).decode())


def index_json(index: Index) -> bytes:
    """Returns the contents of the file of an index."""
    return f"{index.model_dump_json(indent=2)}\n".encode()


def write_atomically(path: Path, text: str) -> None:
    """Writes a small file atomically."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    partial.write_text(text, "utf-8")
    storage.sync(partial)
    partial.rename(path)


def _is_occupied(directory: AnyPath) -> bool:
    if isinstance(directory, RemotePath):
        return any(not LEFTOVERS.fullmatch(name) for name in directory.sizes())
    return directory.exists() and any(directory.iterdir())


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
