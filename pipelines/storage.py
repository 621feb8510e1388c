"""Files of a data set in a local folder or in an object store (`s3://`, `gs://`, `az://`, ...).

`at` turns a location into a `pathlib.Path` or a `RemotePath`. A `RemotePath` has the few methods of
`Path` that this package uses, so that most code does not distinguish between them. obstore does the
transfers, with its own retries; credentials and endpoints come from the environment variables of
each cloud.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeAlias, TypeVar, cast
from urllib.parse import unquote, urlsplit

from pipelines.errors import DataError
from pipelines.object_store import ChangedError as ChangedError
from pipelines.object_store import TransferError, library, once, repeated, store_of, translated

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

#: URLs of buckets, for obstore.
_SCHEMES = ("s3://", "s3a://", "gs://", "az://", "azure://", "abfs://", "abfss://", "memory://")
#: Bytes requested at a time when a file is read sequentially.
_BUFFER_BYTES = 4 << 20
#: Parts of a file that are transferred at the same time, and the smallest size of a part. Object
#: stores take at most 10,000 parts. The memory of a transfer is the product of the two.
_NUM_PARTS, _PART_BYTES, _MAX_PARTS = 4, 8 << 20, 9_000
#: The smallest size of a part that object stores accept.
_LEAST_PART_BYTES = 5 << 20
#: Larger data are uploaded with the timeouts of large uploads.
_SMALL_BYTES = 1 << 20
#: Small files that `in_order` reads at the same time.
_NUM_READ_AHEAD = 32


class Version(NamedTuple):
    """One version of an object.

    Attributes:
        data: Its contents.
        modified: When it was written, by the clock of the server.
        identity: Identifies the version in a conditional write.
    """

    data: bytes
    modified: datetime
    identity: dict[str, str]


class RemotePath:
    """A file or folder in an object store, with a subset of the methods of `pathlib.Path`.

    Args:
        url: Its URL, such as `s3://bucket/folder/file`. The key is not percent-encoded.

    Raises:
        DataError: It has no bucket.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        if not is_object_store(self._url):
            raise DataError(f"{url}: expected a bucket, as in s3://bucket/folder")

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other._url == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The end of the name that begins with its last dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder of this file."""
        return RemotePath(self._url.rpartition("/")[0])

    def is_dir(self) -> bool:
        """Returns whether there are objects in this folder."""
        return repeated(
            self,
            lambda: any(len(c) for c in library().list(self._store, self._key or None)),
            "list",
        )

    def is_file(self) -> bool:
        """Returns whether the object exists."""
        try:
            self.num_bytes()
        except FileNotFoundError:
            return False
        return True

    def num_bytes(self) -> int:
        """Returns the size of the object. Raises `FileNotFoundError` if it is missing."""
        return self.mark()[0]

    def mark(self) -> tuple[int, str]:
        """Returns the size and a mark of the contents. Raises `FileNotFoundError` if missing."""
        return repeated(self, lambda: _mark(library().head(self._store, self._key)))

    def read_bytes(self) -> bytes:
        """Returns the contents. Raises `FileNotFoundError` if the object is missing."""
        return repeated(self, lambda: bytes(library().get(self._store, self._key).bytes()))

    def read_range(self, begin: int, end: int) -> bytes:
        """Returns the bytes from `begin` to `end`, fewer if the object ends before.

        An answer that is cut off is requested again.
        """

        def read() -> bytes:
            data = bytes(library().get_range(self._store, self._key, start=begin, end=end))
            if len(data) != end - begin and self.num_bytes() >= end:
                raise TransferError(
                    f"{self}: the server repeatedly sent too few bytes; check the connection"
                )
            return data

        return repeated(self, read)

    def read_version(self) -> Version:
        """Returns the contents and what identifies them in `replace`."""

        def read() -> Version:
            answer = library().get(self._store, self._key)
            return Version(
                bytes(answer.bytes()), answer.meta["last_modified"], _identity(answer.meta)
            )

        return repeated(self, read)

    def write_bytes(self, data: bytes, *, overwrite: bool = True) -> dict[str, str]:
        """Writes the object atomically, and returns the identity of the version.

        Raises:
            FileExistsError: The object exists, and `overwrite` is false.
        """
        store = self._store if len(data) <= _SMALL_BYTES else self._upload_store
        if overwrite:
            return repeated(self, lambda: _identity(library().put(store, self._key, data)), "write")
        return self._put_once(store, data, "create")

    def replace(self, data: bytes, identity: dict[str, str]) -> dict[str, str]:
        """Writes the object if it still has a version, and returns the identity of the new one.

        Raises:
            ChangedError: The object has another version, or is missing.
        """
        try:
            return self._put_once(self._store, data, identity)
        except FileNotFoundError:
            raise ChangedError(f"{self} was deleted") from None

    def _put_once(self, store: Any, data: bytes, mode: str | dict[str, str]) -> dict[str, str]:
        """Writes the object under a condition, which a first try that succeeded would break."""
        return _identity(
            once(self, lambda: library().put(store, self._key, data, mode=mode), "write")
        )

    def upload(self, file: Path) -> None:
        """Writes the object from a local file, in parts, with bounded memory.

        The object appears when it is complete.
        """
        part = max(_PART_BYTES, -(-file.stat().st_size // _MAX_PARTS))
        options = {"chunk_size": part, "max_concurrency": _NUM_PARTS}
        store = self._upload_store
        repeated(self, lambda: library().put(store, self._key, file, **options), "write")

    def download(self, file: Path) -> None:
        """Copies the object to a local file, in parts, with bounded memory."""
        size = self.num_bytes()
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

        def copy(begin: int) -> None:
            data = self.read_range(begin, min(begin + _PART_BYTES, size))
            while data:
                written = os.pwrite(descriptor, data, begin)
                data, begin = data[written:], begin + written

        try:
            with ThreadPoolExecutor(_NUM_PARTS) as pool:
                for _ in pool.map(copy, range(0, size, _PART_BYTES)):
                    pass
        finally:
            os.close(descriptor)

    def copy_to(self, target: RemotePath) -> None:
        """Copies the object within its bucket, without transferring it to this machine.

        Raises:
            DataError: The target is in another bucket.
        """
        if target._store is not self._store:
            raise DataError(f"{target}: expected a path in the bucket of {self}")
        store = self._upload_store  # the server may take long, too
        repeated(self, lambda: library().copy(store, self._key, target._key), "write")

    def delete_below(self, names: Iterable[str]) -> None:
        """Deletes objects of this folder, in the given order.

        Args:
            names: Their names, as `sizes` returns them. Missing objects are ignored.
        """
        for name in names:
            (self / name).unlink(missing_ok=True)

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object."""
        try:
            repeated(self, lambda: library().delete(self._store, self._key), "delete")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def open(self, mode: str = "rb") -> BinaryIO:
        """Opens the object for reading (`rb`) or, as a streaming upload, for writing (`wb`)."""
        if mode == "wb":
            return self.open_upload()
        return cast(BinaryIO, io.BufferedReader(_Reader(self), _BUFFER_BYTES))

    def open_upload(self, num_open: int = 1) -> BinaryIO:
        """Opens the object for writing, beside others: `num_open` in all, which share memory."""
        with translated(self, "write"):
            return cast(BinaryIO, _Upload(self, num_open))

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of all objects in this folder, by their relative names."""
        return {name: size for name, (size, _) in self.files().items()}

    def files(self) -> dict[str, tuple[int, str]]:
        """Returns the size and a mark of the contents of all objects, by their relative names."""
        prefix = f"{self._key}/" if self._key else ""

        def listed() -> dict[str, tuple[int, str]]:
            return {
                entry["path"].removeprefix(prefix): _mark(entry)
                for chunk in library().list(self._store, self._key or None)
                for entry in chunk
                if entry["path"] != self._key  # an empty object that stands for the folder itself
            }

        return repeated(self, listed, "list")

    @property
    def _store(self) -> Any:
        return store_of(self._bucket)

    @property
    def _upload_store(self) -> Any:
        return store_of(self._bucket, for_uploads=True)

    @property
    def _bucket(self) -> str:
        return "/".join(self._url.split("/", 3)[:3])

    @property
    def _key(self) -> str:
        """The key as it is: `%20`, `#` and `?` have no special meaning in the tools of clouds."""
        return "/".join(self._url.split("/", 3)[3:]).strip("/")


#: A local path, or one in an object store.
AnyPath: TypeAlias = Path | RemotePath


def at(location: str | Path | RemotePath) -> AnyPath:
    """Returns the path of a local file or folder (also `file://`), or of one in an object store."""
    if isinstance(location, Path | RemotePath):
        return location
    if location.startswith("file://"):
        return _local(location)
    if match := re.match(r"(s3a?|gs|az|azure|abfss?|file|hf):(?!//)/*", location):
        right = f"{match[1]}://{location[match.end() :]}"
        raise DataError(f"{location}: expected a local path, or a URL such as {right}")
    if not is_url(location):
        return Path(location)
    if not is_object_store(location):
        cure = "use one of these, or download the files first"
        if location.startswith("hf://"):
            cure = "download it first: hf download --repo-type dataset NAME --local-dir FOLDER"
        raise DataError(f"{location}: expected a local path, s3://, gs:// or az://; {cure}")
    return RemotePath(location)


def relative(path: AnyPath, folder: AnyPath) -> PurePath:
    """Returns the path of a file below a folder, relative to the folder."""
    if isinstance(path, Path):
        return path.relative_to(str(folder))
    return PurePosixPath(str(path)).relative_to(str(folder))


def read_range(path: AnyPath, begin: int, end: int) -> bytes:
    """Returns the bytes from `begin` to `end` of a file, fewer if it ends before."""
    if isinstance(path, RemotePath):
        return path.read_range(begin, end)
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def in_order(
    read: Callable[[_Item], _Result], items: Iterable[_Item], folder: AnyPath
) -> Iterator[_Result]:
    """Yields the result of `read` for each item; from an object store, reads some items ahead."""
    if isinstance(folder, Path):
        yield from map(read, items)
        return
    waiting: deque[Future[_Result]] = deque()
    pool = ThreadPoolExecutor(_NUM_READ_AHEAD, "read-ahead")
    try:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) > _NUM_READ_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def is_url(location: str) -> bool:
    """Returns whether a location is a URL and not a local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", location) is not None


def is_object_store(location: str) -> bool:
    """Returns whether a location is the URL of a bucket that obstore reads and writes."""
    return location.startswith(_SCHEMES)


def flush(folder: Path) -> None:
    """Flushes a local folder and its files to the disk, so that they survive a power failure."""
    for path in [*folder.iterdir(), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Flushes a local file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def num_bytes(path: AnyPath) -> int:
    """Returns the size of a file. Raises `FileNotFoundError` if it is missing."""
    return path.stat().st_size if isinstance(path, Path) else path.num_bytes()


class _Reader(io.RawIOBase):
    """Reads an object by ranges. Wrap it in an `io.BufferedReader`."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._position, self._end = path, 0, path.num_bytes()
        self.name = str(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to a position; does not transfer anything."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._end}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fills the buffer with one request; returns 0 at the end."""
        end = min(self._position + len(buffer), self._end)
        if end <= self._position:
            return 0
        data = self._path.read_range(self._position, end)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _Upload:
    """A streaming upload. The object appears when the block ends without an error.

    Otherwise the upload is discarded, so that a former version of the object remains.
    """

    def __init__(self, path: RemotePath, num_open: int) -> None:
        self._path = path
        # Fewer parts at a time than by default, which would share a slow connection.
        self._writer = library().open_writer(
            path._upload_store,
            path._key,
            buffer_size=_PART_BYTES if num_open <= _NUM_PARTS else _LEAST_PART_BYTES,
            max_concurrency=max(_NUM_PARTS // num_open, 1),
        )

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(OSError, DataError):
            # If the server does not answer, Ctrl-C has to end the program nevertheless.
            discard = functools.partial(self._writer.__exit__, kind, error, traceback)
            once(self._path, discard, "write", timeout=2)

    def write(self, data: bytes) -> int:
        """Appends data."""
        once(self._path, lambda: self._writer.write(data), "write")
        return len(data)

    def close(self) -> None:
        """Completes the upload."""
        once(self._path, self._writer.close, "write")


def _local(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise DataError(f"{url}: expected an absolute path, as in file:///data/images")
    # Of all characters, only those that are percent-encoded have another meaning than in a path.
    return Path(unquote(url.removeprefix(f"file://{parts.netloc}")))


def _mark(facts: Mapping[str, Any]) -> tuple[int, str]:
    return int(facts["size"]), str(facts["e_tag"] or facts["last_modified"])


def _identity(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: facts[name] for name in ("e_tag", "version") if facts.get(name)}
