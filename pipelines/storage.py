"""Files of a data set in a local folder or in an object store (`s3://`, `gs://`, `az://`, ...).

`at` turns a location into a `pathlib.Path` or a `RemotePath`. A `RemotePath` has the few methods of
`Path` that this package uses, so that most code does not distinguish between them. obstore does the
transfers, with its own retries; credentials and endpoints come from the environment variables of
each cloud.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from pipelines.errors import DataError

#: Bytes requested at a time when a file is read sequentially.
_BUFFER_BYTES = 4 << 20
#: Attempts of a request whose answer ends early, beyond the retries of obstore.
_NUM_ATTEMPTS = 4
#: Options of every HTTP client. A stalled connection fails after `read_timeout` and is retried.
CLIENT_OPTIONS: dict[str, Any] = {"connect_timeout": "10s", "read_timeout": "20s"}
RETRY: dict[str, Any] = {"max_retries": 8, "retry_timeout": timedelta(minutes=2)}


class _TransferError(DataError):
    """A transfer failed in spite of the retries of obstore."""


class RemotePath:
    """A file or folder in an object store, with a subset of the methods of `pathlib.Path`.

    Args:
        url: Its URL, such as `s3://bucket/folder/file`.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

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
    def parent(self) -> RemotePath:
        """The folder of this file."""
        return RemotePath(self._url.rpartition("/")[0])

    def is_file(self) -> bool:
        """Returns whether the object exists."""
        try:
            self.num_bytes()
        except FileNotFoundError:
            return False
        return True

    def num_bytes(self) -> int:
        """Returns the size of the object. Raises `FileNotFoundError` if it is missing."""
        with _translated(self):
            return int(_obstore().head(self._store, self._key)["size"])

    def read_bytes(self) -> bytes:
        """Returns the contents. Raises `FileNotFoundError` if the object is missing."""
        with _translated(self):
            return bytes(_obstore().get(self._store, self._key).bytes())

    def read_range(self, begin: int, end: int) -> bytes:
        """Returns the bytes from `begin` to `end`, fewer if the object ends before.

        An answer that is cut off is requested again.
        """
        for attempt in range(_NUM_ATTEMPTS):
            try:
                with _translated(self):
                    data = bytes(_obstore().get_range(self._store, self._key, start=begin, end=end))
            except _TransferError:
                if attempt + 1 == _NUM_ATTEMPTS:
                    raise
            else:
                if len(data) == end - begin or self.num_bytes() < end:
                    return data
            time.sleep(0.1 * 2**attempt)
        raise DataError(f"{self}: the server repeatedly sent too few bytes; check the connection")

    def write_bytes(self, data: bytes, *, overwrite: bool = True) -> None:
        """Writes the object atomically.

        Raises:
            FileExistsError: The object exists, and `overwrite` is false.
        """
        with _translated(self):
            mode = "overwrite" if overwrite else "create"
            _obstore().put(self._store, self._key, data, mode=mode)

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object."""
        try:
            with _translated(self):
                _obstore().delete(self._store, self._key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def open(self, mode: str = "rb") -> BinaryIO:
        """Opens the object for reading (`rb`) or, as a streaming upload, for writing (`wb`)."""
        if mode == "wb":
            with _translated(self):
                return cast(BinaryIO, _Upload(self))
        return cast(BinaryIO, io.BufferedReader(_Reader(self), _BUFFER_BYTES))

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of all objects in this folder, by their relative names."""
        prefix = f"{self._key}/" if self._key else ""
        with _translated(self):
            return {
                entry["path"].removeprefix(prefix): int(entry["size"])
                for chunk in _obstore().list(self._store, self._key or None)
                for entry in chunk
            }

    @property
    def _store(self) -> Any:
        parts = urlsplit(self._url)
        return _store(f"{parts.scheme}://{parts.netloc}")

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self._url).path).strip("/")


#: A local path, or one in an object store.
AnyPath: TypeAlias = Path | RemotePath


def at(location: str | Path | RemotePath) -> AnyPath:
    """Returns the path of a local file or folder (also `file://`), or of one in an object store."""
    if isinstance(location, Path | RemotePath):
        return location
    if location.startswith("file://"):
        return Path(unquote(urlsplit(location).path))
    return RemotePath(location) if is_url(location) else Path(location)


def is_url(location: str) -> bool:
    """Returns whether a location is a URL and not a local path."""
    return re.match(r"[a-z][a-z0-9+.-]+://", location) is not None


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
    """A streaming upload. The object appears when the block ends without an error."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._writer = _obstore().open_writer(path._store, path._key)

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()

    def write(self, data: bytes) -> int:
        """Appends data."""
        with _translated(self._path):
            self._writer.write(data)
        return len(data)

    def close(self) -> None:
        """Completes the upload."""
        with _translated(self._path):
            self._writer.close()


def _obstore() -> Any:
    try:
        importlib.import_module("obstore.exceptions")
        return importlib.import_module("obstore")
    except ImportError:
        raise DataError(
            "reading and writing URLs requires obstore: pip install 'tfdist[cloud]'"
        ) from None


@functools.cache
def _store(root: str) -> Any:
    """Returns the store of a bucket, one per process. Stores in memory live as long as it does."""
    _obstore()
    stores = importlib.import_module("obstore.store")
    if root.startswith("memory://"):
        return stores.MemoryStore()
    client, options = dict(CLIENT_OPTIONS), {}
    if root.startswith(("s3://", "s3a://")):
        options = _profile_credentials()
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            options["endpoint"] = endpoint
            client["allow_http"] = endpoint.startswith("http://")
    with _translated(root):
        return stores.from_url(root, client_options=client, retry_config=RETRY, **options)


def _profile_credentials() -> dict[str, Any]:
    """Returns the credentials of `AWS_PROFILE`, which obstore does not read itself."""
    if not os.environ.get("AWS_PROFILE"):
        return {}
    try:
        provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider()
    except ImportError:
        raise DataError("AWS_PROFILE requires boto3: pip install boto3") from None
    return {"credential_provider": provider}


@contextlib.contextmanager
def _translated(path: RemotePath | str) -> Iterator[None]:
    """Turns errors of obstore into `DataError` of one line, and names the missing permission."""
    errors = _obstore().exceptions
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(2, "No such object", str(path)) from None
    except errors.AlreadyExistsError:
        raise FileExistsError(17, "The object exists already", str(path)) from None
    except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
        raise DataError(
            f"{path}: permission denied ({_first_line(error)}); set the credentials of the cloud, "
            "and grant them reading and listing, and for writing also putting and deleting objects"
        ) from None
    except errors.BaseError as error:
        raise _TransferError(f"{path}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
