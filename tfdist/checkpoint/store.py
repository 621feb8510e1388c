"""A folder with the newest checkpoints of a run and the best one.

A checkpoint is a folder that is written under a temporary name and renamed when it is complete.
For object stores see `bucket_store`.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

import pipelines
from pipelines import storage
from tfdist.checkpoint import manifest
from tfdist.checkpoint.manifest import DamagedError, UnreadableError
from tfdist.checkpoint.snapshot import NO_SHARDS, OwnShards, Packed, Snapshot
from tfdist.console.folders import download_folder
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

    Yields:
        The folder.

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
    """Returns a new name for a damaged checkpoint.

    Args:
        place: Place of the checkpoint.
        exists: Returns whether a name is in use.
    """
    name = f"{_DAMAGED}{place.name}"
    return f"{name}-{uuid.uuid4().hex[:8]}" if exists(name) else name


def _download(url: str, folder: Path, names: Iterable[str]) -> None:
    """Downloads files of a checkpoint.

    Raises:
        DamagedError: A file is missing.
        UnreadableError: The files cannot be transferred.
    """
    for name in names:
        try:
            (storage.RemotePath(url) / name).download(folder / name)
        except FileNotFoundError:
            raise DamagedError(f"{url}/{name} is missing") from None
        except (OSError, pipelines.DataError) as error:
            raise UnreadableError(f"{url}/{name} cannot be downloaded ({error})") from None
