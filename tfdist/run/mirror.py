"""A run folder in an object store: a local folder whose files are uploaded as the run writes them.

Checkpoints are not among these files: `tfdist.checkpoint.store` uploads them.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pipelines
from pipelines.storage import RemotePath
from tfdist.checkpoint.manifest import as_os_error
from tfdist.console.folders import not_uploaded_folder, staging_folder
from tfdist.errors import ConfigurationError

_SECONDS = 30.0


class Mirror:
    """Uploads the files of a local folder that have changed, in the background and at the end.

    A file is uploaded in parts of bounded memory. One that a run appends to is uploaded as a whole.

    Args:
        url: The folder in the object store.
        rank: Rank of the worker. Each worker has a local folder of its own.
        check: Raises an error if this run may no longer write to the object store.
    """

    def __init__(self, url: str, rank: int, check: Callable[[], None]) -> None:
        self._root, self._check = RemotePath(url), check
        # A name that no run has, because the folder of a run may contain other runs.
        self.local = staging_folder(f"{url}/.rank-{rank}")
        self._not_uploaded = not_uploaded_folder(url)
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and time of modification, by name
        self._downloaded: set[str] = set()
        self._uploading = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_open = self._is_failing = False

    def open(self, names: Sequence[str]) -> None:
        """Empties the local folder, and downloads files to it.

        Raises:
            ConfigurationError: The object store cannot be read.
        """
        shutil.rmtree(self.local, ignore_errors=True)
        self.local.mkdir(parents=True)
        self._is_open = True
        try:
            for name in names:
                file = self.local / name
                file.parent.mkdir(exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    (self._root / name).download(file)
                    self._uploaded[name] = _version(file)
        except pipelines.DataError as error:
            raise ConfigurationError(f"The run folder cannot be read: {error}") from None
        self._downloaded = set(self._uploaded)

    def exists(self, name: str) -> bool:
        """Returns whether a file is in the object store.

        Raises:
            ConfigurationError: The object store cannot be read.
        """
        try:
            return (self._root / name).is_file()
        except pipelines.DataError as error:
            raise ConfigurationError(f"The run folder cannot be read: {error}") from None

    def start(self) -> None:
        """Uploads in the background from now on."""
        self._thread = threading.Thread(
            target=self._upload_until_closed, name="tfdist run folder", daemon=True
        )
        self._thread.start()

    def upload(self) -> None:
        """Uploads all files that have changed since the last upload, and deletes removed ones.

        Raises:
            ConfigurationError: Another run has taken over the folder.
            OSError: A file cannot be uploaded.
        """
        with self._uploading:
            self._check()
            if not self.local.is_dir():  # it does not mean that the run has removed its files
                raise OSError(f"{self.local} was removed during the run")
            files = {path.relative_to(self.local).as_posix(): path for path in self._files()}
            with as_os_error():
                for name, file in files.items():
                    try:
                        version = _version(file)
                        if self._uploaded.get(name) != version:
                            (self._root / name).upload(file)
                            self._uploaded[name] = version
                    except FileNotFoundError:
                        if file.exists():  # else it is a temporary file that is gone
                            raise
                for name in set(self._uploaded) - set(files):
                    (self._root / name).unlink(missing_ok=True)
                    del self._uploaded[name]

    def finish(self) -> None:
        """Uploads the remaining changes, and removes the local folder.

        Raises:
            ConfigurationError: A file cannot be uploaded. The message names the folder with a copy
                of all files.
        """
        if not self._is_open:
            return
        self._stop()
        self._is_open = False
        try:
            self.upload()
        except (OSError, ConfigurationError) as error:
            if not self.local.is_dir():
                raise ConfigurationError(
                    f"Files of the run could not be uploaded: {error}."
                ) from None
            shutil.copytree(self.local, self._not_uploaded, dirs_exist_ok=True)
            raise ConfigurationError(
                f"Files of the run could not be uploaded: {error}. They were saved to "
                f"{self._not_uploaded}. Copy them to {self._root}."
            ) from None
        finally:
            shutil.rmtree(self.local, ignore_errors=True)

    def discard(self) -> None:
        """Removes the local folder and uploaded files, unless they existed before."""
        self._stop()
        self._is_open = False
        shutil.rmtree(self.local, ignore_errors=True)
        with contextlib.suppress(OSError, pipelines.DataError):
            if not self._downloaded:
                self._root.delete_below(sorted(self._uploaded))

    def _files(self) -> list[Path]:
        paths = (path for path in self.local.rglob("*") if path.is_file())
        return sorted(
            path
            for path in paths
            if not any(part.startswith(".") for part in path.relative_to(self.local).parts)
        )

    def _stop(self) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _upload_until_closed(self) -> None:
        while not self._ended.wait(_SECONDS):
            try:
                self.upload()
            except (OSError, ConfigurationError) as error:
                if not self._is_failing:
                    line = f"Could not upload a file of the run: {error}. Retrying."
                    print(line, file=sys.stderr, flush=True)
                self._is_failing = True
            else:
                self._is_failing = False


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
