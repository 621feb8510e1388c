"""A folder of checkpoints: whole ones or none, the newest few and the best.

A checkpoint is a folder, written under a temporary name and renamed when it is whole. Where a
rename is not atomic (object stores) it is written in its place, and its manifest last.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.checkpoint import manifest
from tfdist.checkpoint.manifest import DamagedError
from tfdist.checkpoint.snapshot import Packed
from tfdist.errors import ConfigurationError

_FORM = re.compile(r"epoch-(\d+)-step-(\d+)")
_TEMPORARY = ".writing-"


class Place(NamedTuple):
    """Where in a training a checkpoint was made; later places are greater."""

    step: int  # training steps made, over all epochs
    epoch: int  # epochs that have ended

    @property
    def name(self) -> str:
        """Of the checkpoint's folder."""
        return f"epoch-{self.epoch:04d}-step-{self.step:09d}"


class Store:
    """The checkpoints of one run.

    Args:
        folder: Any path that `tf.io.gfile` knows.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)

    def path(self, place: Place) -> str:
        """Returns the path of a checkpoint, whether it is there or not."""
        return posixpath.join(self.folder, place.name)

    def places(self) -> list[Place]:
        """Returns those that look like checkpoints by their names, the newest first."""
        if not tf.io.gfile.isdir(self.folder):
            return []
        names = (name.rstrip("/") for name in tf.io.gfile.listdir(self.folder))
        found = (_FORM.fullmatch(name) for name in names)
        return sorted((Place(int(m[2]), int(m[1])) for m in found if m), reverse=True)

    def newest_sound(self, say: Callable[[str], None]) -> str | None:
        """Returns the path of the newest whole checkpoint, or None where there is none.

        Args:
            say: Told of each newer one that is damaged.
        """
        for place in self.places():
            try:
                manifest.verify(self.path(place))
            except DamagedError as error:
                say(f"{error}. The checkpoint before it is taken.")
            else:
                return self.path(place)
        return None

    def write(self, place: Place, snapshot: Packed, facts: Mapping[str, Any]) -> str:
        """Writes a checkpoint and returns its path; one that is there already stays.

        Raises:
            OSError, tf.errors.OpError: It cannot be written; nothing of it stays.
        """
        final = self.path(place)
        with contextlib.suppress(DamagedError):
            manifest.verify(final)
            return final
        is_local = "://" not in self.folder
        temporary = f"{_TEMPORARY}{place.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path = posixpath.join(self.folder, temporary) if is_local else final
        try:
            if tf.io.gfile.exists(final):
                tf.io.gfile.rmtree(final)
            tf.io.gfile.makedirs(path)
            files = snapshot.write(path)
            if is_local:
                _flush(path)
            manifest.write(path, facts, files)
            if is_local:
                _flush(path)
                Path(path).rename(final)
                _synced(Path(self.folder))
        except BaseException:
            with contextlib.suppress(OSError, tf.errors.OpError):
                tf.io.gfile.rmtree(path)
            raise
        return final

    def clean(self) -> None:
        """Removes what saves that were cut off have left behind; nobody else may be writing."""
        if not tf.io.gfile.isdir(self.folder):
            return
        for name in tf.io.gfile.listdir(self.folder):
            if name.startswith(_TEMPORARY):
                tf.io.gfile.rmtree(posixpath.join(self.folder, name))

    def keep(self, newest: int, best: Place | None) -> None:
        """Removes all but the newest checkpoints and the best."""
        for place in self.places()[newest:]:
            if place != best:
                # The manifest first: what is left of a removal that is cut off is no checkpoint.
                path = self.path(place)
                with contextlib.suppress(tf.errors.NotFoundError):
                    tf.io.gfile.remove(posixpath.join(path, manifest.NAME))
                tf.io.gfile.rmtree(path)


def checkpoints_of(path: str) -> list[str]:
    """Returns the checkpoints that a path means, the newest first.

    Args:
        path: A checkpoint, a folder of them, or a run folder.

    Raises:
        ConfigurationError: There is none.
    """
    for folder in (path, posixpath.join(path, "checkpoints")):
        if places := (store := Store(folder)).places():
            return [store.path(place) for place in places]
    if manifest.is_there(path):
        return [path.rstrip("/")]
    raise ConfigurationError(f"{path}: expected a checkpoint, a folder of them, or a run folder.")


def _flush(folder: str) -> None:
    """Has a local folder and its files on the disk, so that a power cut is as a kill."""
    for path in Path(folder).iterdir():
        _synced(path)
    _synced(Path(folder))


def _synced(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
