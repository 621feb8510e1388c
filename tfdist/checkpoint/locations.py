"""Finds the checkpoints that a path or a URL refers to, and the lock of a folder."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable

from pipelines import storage
from tfdist.checkpoint import manifest
from tfdist.checkpoint.bucket_store import BucketStore
from tfdist.checkpoint.store import Store
from tfdist.errors import ConfigurationError


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
