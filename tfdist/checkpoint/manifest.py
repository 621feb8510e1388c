"""The small file that makes a folder of files a checkpoint.

`manifest.json` names every file with its size and checksum, and has a checksum of itself. It is
written last: where it is there and everything agrees with it, the checkpoint is whole.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

import google_crc32c
import tensorflow as tf

from tfdist.errors import ConfigurationError

NAME = "manifest.json"
FORMAT = 1

_PIECE = 1 << 22  # bytes read at once
_OWN = "crc32c"  # the key of the manifest's own checksum


class DamagedError(ConfigurationError):
    """A folder that is no whole checkpoint; says what is wrong with it."""


def write(folder: str, facts: Mapping[str, Any], files: Sequence[str]) -> None:
    """Writes the manifest of a folder.

    Args:
        folder: Has the files.
        facts: What else it says; to be had as JSON.
        files: Their names.
    """
    listed = {name: _measured(posixpath.join(folder, name)) for name in sorted(files)}
    told = {"format": FORMAT, **facts, "files": listed}
    told[_OWN] = _own_checksum(told)
    with tf.io.gfile.GFile(posixpath.join(folder, NAME), "w") as file:
        file.write(json.dumps(told, indent=2))


def is_there(folder: str) -> bool:
    """Tells whether a folder has a manifest, damaged or not."""
    return bool(tf.io.gfile.exists(posixpath.join(folder, NAME)))


def read(folder: str) -> dict[str, Any]:
    """Returns the manifest of a folder, without a look at the files that it names.

    Raises:
        DamagedError: There is none, or it is damaged, or of a later version of tfdist.
    """
    path = posixpath.join(folder, NAME)
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            told = json.loads(file.read())
    except tf.errors.NotFoundError:
        raise DamagedError(f"{folder} is no checkpoint: it has no {NAME}") from None
    except (ValueError, tf.errors.OpError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DamagedError(f"{path} cannot be read ({reason})") from None
    if not isinstance(told, dict) or told.get(_OWN) != _own_checksum(told):
        raise DamagedError(f"{path} is damaged: it is not what its checksum says")
    if told.get("format") != FORMAT:
        raise DamagedError(
            f"{folder} is of format {told.get('format')}, this tfdist reads {FORMAT}: use the one "
            "that wrote it"
        )
    return told


def verify(folder: str) -> dict[str, Any]:
    """Returns the manifest of a folder whose files are all as it says.

    Raises:
        DamagedError: They are not; says which is not.
    """
    told = read(folder)
    for name, expected in told["files"].items():
        path = posixpath.join(folder, name)
        try:
            found = _measured(path)
        except tf.errors.OpError:
            raise DamagedError(f"{path} is missing or cannot be read") from None
        if found["bytes"] != expected["bytes"]:
            raise DamagedError(
                f"{path} has {found['bytes']} bytes instead of {expected['bytes']}: it was cut off "
                "or overwritten"
            )
        if found != expected:
            raise DamagedError(f"{path} is damaged: its bytes are not those that were written")
    return told


def _measured(path: str) -> dict[str, Any]:
    """The size of a file, and its CRC-32C (Castagnoli 1993), which tells any one flipped bit."""
    checksum, size = 0, 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while piece := file.read(_PIECE):
            checksum, size = google_crc32c.extend(checksum, piece), size + len(piece)
    return {"bytes": size, "crc32c": f"{checksum:08x}"}


def _own_checksum(told: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in told.items() if name != _OWN}
    return f"{google_crc32c.value(json.dumps(rest, sort_keys=True).encode()):08x}"
