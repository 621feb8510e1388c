"""The manifest that makes a folder of files a checkpoint.

`manifest.json` lists every file with its size and checksum, and has a checksum of itself. It is
written last: a checkpoint is complete if its manifest exists and matches every file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import google_crc32c
import tensorflow as tf

import pipelines
from pipelines import storage
from pipelines.storage import RemotePath
from tfdist.errors import ConfigurationError, summary

NAME = "manifest.json"
FORMAT = 1

#: What TensorFlow raises for a file that is missing or has the wrong content. Every other error
#: (permissions, network, disk) says nothing about the file's content.
DAMAGE = (
    tf.errors.NotFoundError,
    tf.errors.DataLossError,
    tf.errors.OutOfRangeError,
    tf.errors.InvalidArgumentError,
)

_READ_BYTES = 1 << 22
_CHECKSUM = "crc32c"  # the key of the manifest's own checksum
_PACKAGES = ("tfdist", "tensorflow", "keras", "numpy")


class DamagedError(ConfigurationError):
    """A checkpoint whose files are missing or differ from what was written."""


class UnreadableError(ConfigurationError):
    """A checkpoint that may be intact, but cannot be read: an I/O error or a newer format."""


def write(folder: str, facts: Mapping[str, Any], files: Sequence[str]) -> None:
    """Writes the manifest of a folder.

    Args:
        folder: The folder that has the files.
        facts: Further entries of the manifest; must be serializable as JSON.
        files: The names of the files.
    """
    listed = {name: measure(posixpath.join(folder, name)) for name in sorted(files)}
    with tf.io.gfile.GFile(posixpath.join(folder, NAME), "w") as file:
        file.write(text_of(facts, listed))


def text_of(facts: Mapping[str, Any], listed: Mapping[str, Any]) -> str:
    """Returns a manifest.

    Args:
        facts: Further entries of the manifest; must be serializable as JSON.
        listed: What `measure` returned for each file, by its name.
    """
    content = {"format": FORMAT, **facts, "files": listed}
    content[_CHECKSUM] = _checksum_of(content)
    return json.dumps(content, indent=2)


def put(folder: RemotePath, content: bytes) -> None:
    """Writes a manifest to a bucket, after all other files of the checkpoint.

    Raises:
        OSError: Another run has written the same checkpoint.
    """
    path = folder / NAME
    try:
        path.write_bytes(content, overwrite=False)
    except FileExistsError:  # our own earlier write, if the contents are the same
        if path.read_bytes() != content:
            raise OSError(f"{folder} was written by another run") from None


def exists(folder: str) -> bool:
    """Returns whether a folder has a manifest, damaged or not."""
    if storage.is_object_store(folder):
        return (RemotePath(folder) / NAME).is_file()
    return bool(tf.io.gfile.exists(posixpath.join(folder, NAME)))


def read(folder: str) -> dict[str, Any]:
    """Returns the manifest of a folder or URL, without reading the files that it lists.

    Raises:
        DamagedError: The manifest is missing or damaged.
        UnreadableError: The manifest cannot be read, or was written by a newer tfdist.
    """
    path = posixpath.join(folder, NAME)
    try:
        if storage.is_object_store(path):
            data = RemotePath(path).read_bytes()
        else:
            with tf.io.gfile.GFile(path, "rb") as file:
                data = bytes(file.read())
        content = json.loads(data)
    except (tf.errors.NotFoundError, FileNotFoundError):
        raise DamagedError(f"{folder} is not a checkpoint: it has no {NAME}") from None
    except tf.errors.OpError as error:
        raise error_of(path, error) from None
    except pipelines.DataError as error:
        raise UnreadableError(str(error)) from None
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
        raise DamagedError(f"{path} is damaged ({summary(error)})") from None
    if not isinstance(content, dict) or content.get(_CHECKSUM) != _checksum_of(content):
        raise DamagedError(f"{path} is damaged: it does not match its checksum")
    if content.get("format") != FORMAT:
        raise UnreadableError(
            f"{folder} has checkpoint format {content.get('format')}, but this version of tfdist "
            f"reads format {FORMAT}: use the version of tfdist that wrote it"
        )
    if not isinstance(content.get("files"), dict):
        raise DamagedError(f"{path} is damaged: it does not list the files of the checkpoint")
    return content


def verify(folder: str, files: Mapping[str, Any]) -> None:
    """Compares files of a local folder with what the manifest says about them.

    Raises:
        DamagedError: A file is missing or differs from the manifest.
        UnreadableError: A file cannot be read.
    """
    for name, expected in files.items():
        path = posixpath.join(folder, name)
        try:
            measured = measure(path)
        except tf.errors.OpError as error:
            raise error_of(path, error) from None
        if measured["bytes"] != expected["bytes"]:
            raise DamagedError(
                f"{path} has {measured['bytes']} bytes instead of the {expected['bytes']} that "
                "were written: it was truncated or overwritten"
            )
        if measured != expected:
            raise DamagedError(f"{path} is damaged: its content differs from what was written")


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    """Converts transfer errors to OSError, which a local disk raises."""
    try:
        yield
    except (pipelines.DataError, UnreadableError) as error:
        raise OSError(str(error)) from error


def error_of(path: str, error: Exception) -> DamagedError | UnreadableError:
    """Returns the error to raise when reading a file of a checkpoint has failed."""
    if isinstance(error, tf.errors.NotFoundError):
        return DamagedError(f"{path} is missing")
    if isinstance(error, DAMAGE) or not isinstance(error, (OSError, tf.errors.OpError)):
        return DamagedError(f"{path} is damaged ({summary(error)})")
    return UnreadableError(f"{path} cannot be read ({summary(error)})")


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of the software that a run and its checkpoints depend on."""
    return {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()}


def _version(package: str) -> str:
    """Returns the installed version; for a package that is not installed, its `__version__`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(__import__(package).__version__)


def measure(path: str) -> dict[str, Any]:
    """Returns the size of a file and its CRC-32C (Castagnoli 1993)."""
    checksum, size = 0, 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            checksum, size = google_crc32c.extend(checksum, chunk), size + len(chunk)
    return {"bytes": size, "crc32c": f"{checksum:08x}"}


def _checksum_of(content: Mapping[str, Any]) -> str:
    covered = {name: value for name, value in content.items() if name != _CHECKSUM}
    return f"{google_crc32c.value(json.dumps(covered, sort_keys=True).encode()):08x}"
