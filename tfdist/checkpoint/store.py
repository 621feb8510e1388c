"""A folder with the newest checkpoints of a run and the best one.

A checkpoint is a folder that is written under a temporary name and renamed when it is complete. In
an object store (`s3://`, `gs://`, `az://`), it is written to a local staging folder first, by the
same code, and then uploaded file by file, the manifest last. There, a folder without a manifest
comes from an interrupted upload; it does not count as a checkpoint and is removed. A bucket has the
same files as a local folder.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import tensorflow as tf

import pipelines
from pipelines import storage
from pipelines.storage import RemotePath
from tfdist.checkpoint import manifest
from tfdist.checkpoint.manifest import DamagedError, UnreadableError
from tfdist.checkpoint.snapshot import NO_SHARDS, OwnShards, Packed, Snapshot
from tfdist.console.folders import download_folder, not_uploaded_folder, staging_folder
from tfdist.errors import ConfigurationError

_FORM = re.compile(r"epoch-(\d+)-step-(\d+)")
#: Begins the names of folders that are not complete yet.
TEMPORARY = ".writing-"
_DAMAGED = "damaged-"


class Place(NamedTuple):
    """The step and epoch of a checkpoint. Later ones compare greater.

    Attributes:
        step: Training steps so far, over all epochs.
        epoch: Completed epochs.
    """

    step: int
    epoch: int

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder."""
        return f"epoch-{self.epoch:04d}-step-{self.step:09d}"

    @classmethod
    def named(cls, name: str) -> Place | None:
        """Parses a folder's name. Returns None if it is not the name of a checkpoint."""
        match = _FORM.fullmatch(name)
        return match and cls(int(match[2]), int(match[1]))


class Store:
    """The checkpoints of one run.

    Args:
        folder: Any path that `tf.io.gfile` supports.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)

    @property
    def is_local(self) -> bool:
        """Whether the folder is in the file system of this host, where a rename is atomic."""
        return "://" not in self.folder

    def path(self, place: Place) -> str:
        """Returns the path of a checkpoint, which need not exist."""
        return posixpath.join(self.folder, place.name)

    def places(self) -> list[Place]:
        """Returns the checkpoints in the folder, by their names, the newest first.

        Raises:
            UnreadableError: The folder exists, but cannot be read.
        """
        try:
            if not tf.io.gfile.stat(self.folder).is_directory:
                return []
            names = [name.rstrip("/") for name in tf.io.gfile.listdir(self.folder)]
        except (tf.errors.NotFoundError, tf.errors.FailedPreconditionError):
            return []  # the folder or a parent does not exist
        except tf.errors.OpError as error:
            raise manifest.error_of(self.folder, error) from None
        return sorted(filter(None, map(Place.named, names)), reverse=True)

    def load_newest(
        self, say: Callable[[str], None], without: OwnShards = NO_SHARDS
    ) -> tuple[str, Packed] | None:
        """Reads the newest checkpoint that is not damaged.

        Args:
            say: Called with a line for each newer checkpoint that is damaged.
            without: As for `load`.

        Returns:
            The path of the checkpoint and its content; None if the folder has no checkpoints.

        Raises:
            ConfigurationError: All checkpoints of the folder are damaged; names each of them.
            UnreadableError: A checkpoint cannot be read, for a reason other than damage.
        """
        problems: list[str] = []
        for place in self.places():
            path = self.path(place)
            try:
                packed = load(path, without)
            except DamagedError as error:
                problems.append(str(error))
            else:
                for problem in problems:
                    say(f"{problem}. Resuming from an older checkpoint.")
                return path, packed
        if not problems:
            return None
        raise ConfigurationError(
            f"All {len(problems)} checkpoints in {self.folder} are damaged: {'; '.join(problems)}. "
            "Restore one of them from a backup. To train from the beginning, use resume='never' "
            "(--resume never), which renames them, or use another folder."
        )

    def all_damaged(self) -> bool:
        """Returns whether the folder has checkpoints and all of them are damaged.

        Raises:
            UnreadableError: A checkpoint cannot be read, for a reason other than damage.
        """
        places = self.places()
        return bool(places) and not any(self._is_intact(place) for place in places)

    def set_aside(self, places: Sequence[Place]) -> list[str]:
        """Renames checkpoints so that they no longer count as such. Returns the new names."""
        renamed = []
        for place in places:
            name = damaged_name(
                place, lambda name: bool(tf.io.gfile.exists(posixpath.join(self.folder, name)))
            )
            tf.io.gfile.rename(self.path(place), posixpath.join(self.folder, name))
            renamed.append(name)
        return renamed

    def write(self, place: Place, snapshot: Packed, facts: Mapping[str, Any]) -> str:
        """Writes a checkpoint, unless an intact one of the same name exists. Returns its path.

        Raises:
            OSError, tf.errors.OpError: The checkpoint cannot be written. Partial files are removed.
        """
        final = self.path(place)
        with contextlib.suppress(DamagedError, UnreadableError):
            manifest.verify(final, manifest.read(final)["files"])
            return final
        temporary = f"{TEMPORARY}{place.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        path = posixpath.join(self.folder, temporary) if self.is_local else final
        try:
            if tf.io.gfile.exists(final):
                tf.io.gfile.rmtree(final)
            tf.io.gfile.makedirs(path)
            files = snapshot.write(path)
            if self.is_local:
                storage.flush(Path(path))
            manifest.write(path, facts, files)
            if self.is_local:
                storage.flush(Path(path))
                Path(path).rename(final)
                storage.sync(Path(self.folder))
        except BaseException:
            with contextlib.suppress(OSError, tf.errors.OpError):
                tf.io.gfile.rmtree(path)
            raise
        return final

    def clean(self) -> None:
        """Removes the files of interrupted saves. No other process may write at the same time."""
        if not tf.io.gfile.isdir(self.folder):
            return
        for name in tf.io.gfile.listdir(self.folder):
            if name.startswith(TEMPORARY):
                tf.io.gfile.rmtree(posixpath.join(self.folder, name))

    def keep(self, newest: int, best: Place | None) -> None:
        """Removes all checkpoints except the newest ones and the best."""
        for place in self.places()[newest:]:
            if place != best:
                # The manifest first, so that a partly removed folder is not a checkpoint.
                path = self.path(place)
                with contextlib.suppress(tf.errors.NotFoundError):
                    tf.io.gfile.remove(posixpath.join(path, manifest.NAME))
                tf.io.gfile.rmtree(path)

    def finish(self) -> None:
        """Completes pending transfers, at the end of a run.

        Raises:
            ConfigurationError: The last checkpoint could not be uploaded.
        """

    def _is_intact(self, place: Place) -> bool:
        try:
            load(self.path(place))
        except DamagedError:
            return False
        return True


class BackgroundWriter:
    """A thread that writes one checkpoint at a time, in order, while training continues."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Waits for the previous job, then starts a new one.

        Raises:
            Exception: Whatever the previous job raised.
        """
        self.wait()

        def run() -> None:
            try:
                job()
            except Exception as error:  # raised by the next call to `wait`
                self._error = error

        # Not a daemon thread, so that the interpreter waits for it before it exits.
        self._thread = threading.Thread(target=run, name="tfdist checkpoint writer")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the job in progress.

        Raises:
            Exception: Whatever the job raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def load(path: str, without: OwnShards = NO_SHARDS) -> Packed:
    """Reads a checkpoint after comparing its files with its manifest.

    Args:
        path: A local folder, or the URL of one in an object store, which is downloaded.
        without: Variables that are not read. Files that have nothing else are not compared.

    Raises:
        DamagedError: The checkpoint is damaged.
        UnreadableError: The checkpoint cannot be read for another reason.
    """
    try:
        with verified_files(path, without.needed_for_others) as folder:
            packed = Packed.read(folder, without.shards)
    except DamagedError:
        if not without.shards:
            raise
        # The checkpoint may have shards of variables that are whole in this run.
        with verified_files(path, set) as folder:
            packed = Packed.read(folder, without.shards)
    Snapshot.unpacked(packed, path, without.shards)
    return packed


@contextlib.contextmanager
def verified_files(
    path: str, choose: Callable[[Collection[str]], Collection[str]]
) -> Iterator[str]:
    """Provides files of a checkpoint in a local folder, after comparing them with its manifest.

    Args:
        path: A local folder, or the URL of one in an object store.
        choose: Returns which of the files that the manifest lists are needed.

    Raises:
        DamagedError: A file is damaged.
        UnreadableError: A file cannot be read.
    """
    listed = manifest.read(path)["files"]
    files = {name: listed[name] for name in choose(listed)}
    if not storage.is_object_store(path):
        manifest.verify(path, files)
        yield path
        return
    with download_folder() as folder:
        try:
            _download(path, Path(folder), files)
            manifest.verify(folder, files)
            yield folder
        except (DamagedError, UnreadableError) as error:
            raise type(error)(str(error).replace(folder, path)) from None


def damaged_name(place: Place, exists: Callable[[str], bool]) -> str:
    """Returns a new name for a damaged checkpoint."""
    name = f"{_DAMAGED}{place.name}"
    return f"{name}-{uuid.uuid4().hex[:8]}" if exists(name) else name


def _download(url: str, folder: Path, names: Iterable[str]) -> None:
    """Downloads files of a checkpoint."""
    for name in names:
        try:
            (storage.RemotePath(url) / name).download(folder / name)
        except FileNotFoundError:
            raise DamagedError(f"{url}/{name} is missing") from None
        except (OSError, pipelines.DataError) as error:
            raise UnreadableError(f"{url}/{name} cannot be downloaded ({error})") from None


# ---- in an object store ----


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
            # No run clears this folder.
            staged = Path(self._staged.path(cast(Place, self._pending)))
            target = not_uploaded_folder(self.folder) / staged.name
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            local = Path(shutil.move(staged, target))
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
            if manifest.NAME in files:
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
        """Returns the file sizes of each folder with a checkpoint's name."""
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

    def _clear_staging(self) -> None:
        self._pending = None
        shutil.rmtree(self._staged.folder, ignore_errors=True)


def _complete(files_of: Mapping[Place, Mapping[str, int]]) -> list[Place]:
    """Returns the places of complete checkpoints, the newest first."""
    return sorted(
        (place for place, files in files_of.items() if manifest.NAME in files), reverse=True
    )


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
