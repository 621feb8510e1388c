"""Checkpoints in an object store (`s3://`, `gs://`, `az://`), and the store of any folder.

A checkpoint is written to a local staging folder first, by the code for local folders, and then
uploaded file by file, the manifest last. A folder without a manifest comes from an interrupted
upload; it does not count as a checkpoint and is removed. A bucket has the same files as a local
folder.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pipelines
from pipelines import storage
from pipelines.storage import RemotePath
from tfdist.checkpoint import manifest
from tfdist.checkpoint.manifest import DamagedError, UnreadableError
from tfdist.checkpoint.snapshot import Packed
from tfdist.checkpoint.store import Place, Store, damaged_name
from tfdist.console.folders import not_uploaded_folder, staging_folder
from tfdist.errors import ConfigurationError


class BucketStore(Store):
    """The checkpoints of one run in a bucket.

    Args:
        url: The folder.
        before_upload: Called before each upload, in the same thread; for files that a resumed run
            needs together with the checkpoint.
    """

    def __init__(self, url: str, before_upload: Callable[[], None] | None = None) -> None:
        super().__init__(url.rstrip("/"))
        self._root = RemotePath(self.folder)
        self._staged = Store(staging_folder(self.folder))
        self._before_upload = before_upload or (lambda: None)
        self._pending: Place | None = None  # staged, but not uploaded
        self._has_staged = False

    def places(self) -> list[Place]:
        return _complete(self._list_files())

    def write(self, place: Place, snapshot: Packed, facts: Mapping[str, Any]) -> str:
        """Writes and uploads a checkpoint, unless an intact one of the same name exists.

        Raises:
            OSError, tf.errors.OpError: The checkpoint cannot be written or uploaded. If the upload
                fails, it stays in the staging folder until the next one, and `finish` retries.
        """
        with manifest.as_os_error():
            if self._is_uploaded(place):
                return self.path(place)
        self._clear_staging()
        self._has_staged = True
        self._staged.write(place, snapshot, facts)
        self._pending = place
        self._upload(place)
        return self.path(place)

    def finish(self) -> None:
        try:
            if self._pending is not None:
                print(
                    f"Retrying the upload of the last checkpoint to {self.folder}. This may take "
                    "minutes: requests to a server that does not respond time out after nine.",
                    file=sys.stderr,
                    flush=True,
                )
                self._upload(self._pending)
        except OSError as error:
            local = self._move_pending()
            raise ConfigurationError(
                f"The last checkpoint could not be uploaded to {self.folder}: {error}. It was "
                f"saved to {local}. To resume from it, copy that folder to "
                f"{self.folder}/{local.name}."
            ) from error
        finally:
            if self._has_staged:
                self._clear_staging()

    def clean(self) -> None:
        for place, files in self._list_files().items():
            listed: set[str] = set()
            if _is_complete(files):
                # A process that was killed after it wrote the manifest may leave files beside it.
                try:
                    listed = {manifest.NAME, *manifest.read(self.path(place))["files"]}
                except (DamagedError, UnreadableError):  # reported by whoever reads the checkpoint
                    continue
            self._remove(place, files.keys() - listed)

    def keep(self, newest: int, best: Place | None) -> None:
        with manifest.as_os_error():
            files_of = self._list_files()
            whole = _complete(files_of)
            for place in files_of:
                if place not in whole[:newest] and place != best:
                    self._remove(place, files_of[place])

    def set_aside(self, places: Sequence[Place]) -> list[str]:
        renamed = []
        files_of = self._list_files()
        for place in places:
            name = damaged_name(place, lambda name: bool((self._root / name).sizes()))
            for file in files_of[place]:
                (self._root / place.name / file).copy_to(self._root / name / file)
            self._remove(place, files_of[place])
            renamed.append(name)
        return renamed

    def _list_files(self) -> dict[Place, dict[str, int]]:
        """Returns the file sizes of each folder with a checkpoint's name.

        Raises:
            UnreadableError: The bucket cannot be listed.
        """
        files_of: dict[Place, dict[str, int]] = {}
        try:
            sizes = self._root.sizes()
        except pipelines.DataError as error:
            raise UnreadableError(str(error)) from None
        for name, size in sizes.items():
            folder, _, file = name.partition("/")
            if (place := Place.named(folder)) is not None:
                files_of.setdefault(place, {})[file] = size
        return files_of

    def _is_uploaded(self, place: Place) -> bool:
        """Returns whether a checkpoint is in the bucket; removes one with missing files."""
        files = self._list_files().get(place, {})
        with contextlib.suppress(DamagedError, UnreadableError):
            listed = manifest.read(self.path(place))["files"]
            if all(files.get(name) == entry["bytes"] for name, entry in listed.items()):
                return True
        self._remove(place, files)
        return False

    def _upload(self, place: Place) -> None:
        local, target = Path(self._staged.path(place)), self._root / place.name
        with manifest.as_os_error():
            self._before_upload()
            for file in sorted(local.iterdir()):
                if file.name != manifest.NAME:
                    (target / file.name).upload(file)
            manifest.put(target, (local / manifest.NAME).read_bytes())
        self._pending = None
        self._clear_staging()

    def _remove(self, place: Place, files: Iterable[str]) -> None:
        # The manifest first, so that a partly removed folder does not count as a checkpoint.
        names = sorted(files, key=lambda name: name != manifest.NAME)
        (self._root / place.name).delete_below(names)

    def _move_pending(self) -> Path:
        """Moves the checkpoint that could not be uploaded to a folder that no run clears."""
        staged = Path(self._staged.path(cast(Place, self._pending)))
        target = not_uploaded_folder(self.folder) / staged.name
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(staged, target))

    def _clear_staging(self) -> None:
        self._pending = None
        shutil.rmtree(self._staged.folder, ignore_errors=True)


def _complete(files_of: Mapping[Place, Mapping[str, int]]) -> list[Place]:
    """Returns the places of complete checkpoints, the newest first."""
    return sorted((place for place, files in files_of.items() if _is_complete(files)), reverse=True)


def _is_complete(files: Mapping[str, int]) -> bool:
    return manifest.NAME in files


def store_at(
    folder: str | os.PathLike[str], before_upload: Callable[[], None] | None = None
) -> Store:
    """Returns the checkpoints in a folder.

    Args:
        folder: A local folder, the URL of one in an object store, or another path that
            `tf.io.gfile` supports.
        before_upload: As for `BucketStore`; is not called for other folders.
    """
    path = os.fspath(folder)
    if storage.is_object_store(path):
        return BucketStore(path, before_upload)
    return Store(str(storage.at(path)) if path.startswith("file://") else path)


def checkpoints_of(path: str) -> list[str]:
    """Returns the checkpoints that a path refers to, the newest first.

    Args:
        path: A checkpoint, a folder of checkpoints, or a run folder; local or a URL.

    Raises:
        ConfigurationError: There is none.
    """
    for folder in (path, posixpath.join(path, "checkpoints")):
        if places := (store := store_at(folder)).places():
            return [store.path(place) for place in places]
    if manifest.exists(path):
        return [path.rstrip("/")]
    raise ConfigurationError(
        f"{path}: expected a checkpoint, a folder of checkpoints, or a run folder."
    )
