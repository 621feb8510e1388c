"""Checkpoints that all ranks write together, for models whose variables are sharded over processes.

Each rank writes its shards to a data file of one TensorFlow checkpoint, and then a report with the
file's checksum and its index. Rank 0, which also writes what is not sharded, waits for the reports,
merges the indexes and publishes the manifest.

The files go to a local folder that all ranks share, or to a bucket (`Target`). Their names have a
token of the save, so that a process that was believed dead cannot change a later checkpoint.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

import pipelines
from pipelines import storage
from pipelines.storage import RemotePath
from tfdist.checkpoint import manifest
from tfdist.checkpoint.snapshot import STATE, VARIABLES, Packed
from tfdist.checkpoint.store import TEMPORARY, Place
from tfdist.console.folders import staging_folder

#: Seconds between two looks for a report: at first, and at most.
_POLL_SECONDS = (0.05, 2.0)

#: A rank's file and its checksum, and its index in base64.
Report = Mapping[str, Any]


@dataclass
class JointSave:
    """One save by all ranks.

    Attributes:
        place: The step and epoch of the checkpoint.
        token: The same on all ranks, and different for each save.
        rank: This rank.
        num_ranks: Number of ranks.
        deadline: The time (`time.monotonic`) up to which rank 0 waits for the others.
    """

    place: Place
    token: str
    rank: int
    num_ranks: int
    deadline: float = math.inf

    @property
    def prefix(self) -> str:
        """The prefix of the TensorFlow checkpoint's files."""
        return f"{VARIABLES}-{self.token}"

    @property
    def data_name(self) -> str:
        """The name of this rank's data file."""
        return f"{self.prefix}.data-{self.rank:05d}-of-{self.num_ranks:05d}"

    def report_name(self, rank: int) -> str:
        """The name of a rank's report."""
        return f"{self.prefix}.report-{rank:05d}"


class Target(ABC):
    """Where the ranks put the files of one save. All methods raise OSError if they fail."""

    @abstractmethod
    def workspace(self) -> contextlib.AbstractContextManager[str]:
        """Returns a new local folder for files that `put` takes, which its block removes."""

    @abstractmethod
    def put(self, file: Path) -> None:
        """Adds a local file under its name; it appears when it is complete."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Returns the contents of a file that any rank has put; None if it does not exist."""

    @abstractmethod
    def publish(self, text: str, names: set[str]) -> None:
        """Makes the files a checkpoint.

        Args:
            text: Its manifest.
            names: The files that it lists; others are removed.
        """

    @abstractmethod
    def discard(self) -> None:
        """Removes the files of a save that failed."""


def target_at(
    folder: str, save: JointSave, before_upload: Callable[[], None] | None = None
) -> Target:
    """Returns where to put the files of one save.

    Args:
        folder: The folder of checkpoints: local, or a URL.
        save: The save.
        before_upload: Called by `publish`, if the folder is in a bucket.
    """
    if storage.is_object_store(folder):
        return _InBucket(folder, save, before_upload or (lambda: None))
    return _InFolder(Path(folder), save)


def write_part(target: Target, packed: Packed, save: JointSave) -> Report:
    """Writes what this rank has, and returns its report, which other ranks than 0 also write."""
    with target.workspace() as name:
        folder = Path(name)
        packed.write_variables(str(folder / "part"))
        data = (folder / "part.data-00000-of-00001").rename(folder / save.data_name)
        index = (folder / "part.index").read_bytes()
        files = {data.name: manifest.measure(str(data))}
        report = {"files": files, "index": base64.b64encode(index).decode()}
        target.put(data)
        if save.rank:
            put_text(target, folder, save.report_name(save.rank), json.dumps(report))
    return report


def put_text(target: Target, folder: Path, name: str, text: str) -> None:
    """Puts a file with a text, which is written in a workspace before."""
    (folder / name).write_text(text)
    target.put(folder / name)


def complete(
    target: Target, own: Report, text: str, facts: Mapping[str, Any], save: JointSave
) -> None:
    """Waits for the parts of all ranks, and makes them a checkpoint. Called on rank 0."""
    reports = [own, *(_wait_for(target, rank, save) for rank in range(1, save.num_ranks))]
    listed: dict[str, Any] = {}
    with target.workspace() as name:
        folder = Path(name)
        _merge_indexes(folder, reports, save)
        (folder / STATE).write_text(text + "\n")
        for file in (folder / f"{save.prefix}.index", folder / STATE):
            listed[file.name] = manifest.measure(str(file))
            target.put(file)
    for report in reports:
        listed |= report["files"]
    target.publish(manifest.text_of(facts, listed), {*listed, manifest.NAME})


def _wait_for(target: Target, rank: int, save: JointSave) -> Report:
    seconds, most = _POLL_SECONDS
    while (data := target.read(save.report_name(rank))) is None:
        # Python joins this thread when the main thread has ended, and nobody sets the deadline.
        if time.monotonic() > save.deadline or not threading.main_thread().is_alive():
            raise OSError(f"rank {rank} has not written its part of {save.place.name}")
        time.sleep(seconds)
        seconds = min(1.5 * seconds, most)
    return dict(json.loads(data))


def _merge_indexes(folder: Path, reports: list[Report], save: JointSave) -> None:
    """Writes the index of the whole TensorFlow checkpoint.

    TensorFlow also renames the data files, which are elsewhere: empty files stand for them.
    """
    prefixes = [str(folder / f"part-{rank:05d}") for rank in range(len(reports))]
    for prefix, report in zip(prefixes, reports, strict=True):
        Path(f"{prefix}.index").write_bytes(base64.b64decode(report["index"]))
        Path(f"{prefix}.data-00000-of-00001").touch()
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes, destination_prefix=str(folder / save.prefix)
        )


class _InFolder(Target):
    """A local folder with a temporary name, which is renamed when the checkpoint is complete."""

    def __init__(self, root: Path, save: JointSave) -> None:
        self._root, self._final = root, root / save.place.name
        self._folder = root / f"{TEMPORARY}{save.place.name}-{save.token}"

    @contextlib.contextmanager
    def workspace(self) -> Iterator[str]:
        self._folder.mkdir(exist_ok=True)  # not its parents, which may be those of another host
        with tempfile.TemporaryDirectory(prefix="part-", dir=self._folder) as name:
            yield name

    def put(self, file: Path) -> None:
        storage.sync(file)
        file.rename(self._folder / file.name)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def publish(self, text: str, names: set[str]) -> None:
        (self._folder / manifest.NAME).write_text(text)
        for file in self._folder.iterdir():
            if file.name not in names:
                file.unlink()
        storage.flush(self._folder)
        self._folder.rename(self._final)
        storage.sync(self._root)

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class _InBucket(Target):
    """A folder in a bucket, which is a checkpoint if it has a manifest."""

    def __init__(self, url: str, save: JointSave, before_upload: Callable[[], None]) -> None:
        self._folder = RemotePath(url) / save.place.name
        self._staging = staging_folder(f"{url.rstrip('/')}-rank-{save.rank}")
        self._token, self._before_upload = save.token, before_upload

    @contextlib.contextmanager
    def workspace(self) -> Iterator[str]:
        shutil.rmtree(self._staging, ignore_errors=True)  # of a process that was killed
        self._staging.mkdir(parents=True)
        try:
            yield tempfile.mkdtemp(dir=self._staging)
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)

    def put(self, file: Path) -> None:
        with manifest.as_os_error():
            (self._folder / file.name).upload(file)

    def read(self, name: str) -> bytes | None:
        try:
            with manifest.as_os_error():
                return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def publish(self, text: str, names: set[str]) -> None:
        with manifest.as_os_error():
            self._before_upload()
            manifest.put(self._folder, text.encode())
            self._folder.delete_below({*self._folder.sizes()} - names)

    def discard(self) -> None:
        with contextlib.suppress(OSError, pipelines.DataError):
            self._folder.delete_below(n for n in self._folder.sizes() if self._token in n)
