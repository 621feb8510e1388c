"""Working folders, which keep finished shards until all of them exist.

On a local disk, this is a hidden folder beside the destination, whose shards are moved there at the
end. In an object store, shards are written to the destination itself, beside a folder `.packing`.
They become a data set when the index is written, last. Several machines can pack parts of one plan
at the same time.
"""

from __future__ import annotations

import abc
import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format import offsets
from pipelines.format.index import INDEX_NAME, Index, Shard
from pipelines.pack.parts import Part
from pipelines.sources.account import Account, save_account
from pipelines.storage import AnyPath, RemotePath
from pipelines.writing import (
    LEFTOVERS,
    PACKING,
    existing_index,
    index_json,
    publish,
    write_atomically,
)

_PLAN = "plan.json"


class SupersededError(DataError):
    """Another process has published the data set, or has started to pack something else."""


class FinishedShard(BaseModel):
    """The description of a complete shard.

    Attributes:
        shard: The shard in the index.
        changes: What was done to its examples.
        mark: The mark of the object that has it; None: it is a local file.
    """

    shard: Shard
    changes: Account
    mark: tuple[int, str] | None = None


class WorkFolder(abc.ABC):
    """Keeps finished shards and their descriptions. A shard without a description is not finished.

    Instances are pickled to the worker processes.
    """

    @abc.abstractmethod
    def lock(self, part: Part | None) -> contextlib.AbstractContextManager[None]:
        """Prevents other processes from writing the same shards within the block."""

    @abc.abstractmethod
    def prepare(self, plan: str, part: Part | None) -> None:
        """Removes the shards of another plan, or raises `DataError` if only a part is packed."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises `SupersededError` if another process has published or replaced the shards."""

    @abc.abstractmethod
    def path(self, name: str) -> AnyPath:
        """Returns the path to which a shard is written."""

    @abc.abstractmethod
    def finish(
        self, name: str, shard: Shard, table: Sequence[int], changes: Account
    ) -> FinishedShard:
        """Records that a shard is complete. `table` has the offsets of its records."""

    @abc.abstractmethod
    def finished(self, name: str) -> FinishedShard | None:
        """Returns the description of a finished shard, or None if it is not finished."""

    def all_finished(self, names: Sequence[str]) -> list[FinishedShard | None]:
        """Returns what `finished` returns for each name."""
        return list(map(self.finished, names))

    @abc.abstractmethod
    def publish(
        self, index: Index, expected_attributes: Mapping[str, object], account: Account
    ) -> Index:
        """Turns the finished shards into a data set, and returns its index."""


def work_folder(directory: AnyPath) -> WorkFolder:
    """Returns the working folder of a destination."""
    if isinstance(directory, RemotePath):
        return _RemoteWork(directory)
    return _LocalWork(directory)


def _other_plan(path: AnyPath) -> DataError:
    return DataError(
        f"{path}: this destination contains parts that were packed with other options; use the "
        "same source and options for all parts, or delete them"
    )


class _LocalWork(WorkFolder):
    """`.NAME.packing/` with `plan.json`, `shards/` and a JSON description of each shard."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory.with_name(f".{directory.name}.packing")
        self._shards = self._path / "shards"

    @contextlib.contextmanager
    def lock(self, part: Part | None) -> Iterator[None]:
        """Locks the folder. The system releases the lock when the process ends for any reason.

        Parts share the folder, but each may be packed by one process only. Those of another
        division have some of the same shards, and must wait.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        kind = fcntl.LOCK_SH if part else fcntl.LOCK_EX
        with contextlib.ExitStack() as stack:
            self._hold(stack, os.open(self._path, os.O_RDONLY), kind)
            if part:
                name = f"part-{part.number}-of-{part.num_parts}.lock"
                descriptor = os.open(self._path / name, os.O_RDWR | os.O_CREAT)
                self._hold(stack, descriptor, fcntl.LOCK_EX)
            if part and part.num_parts:  # not for `--finish`, which writes no shards
                same = (f"-of-{part.num_parts}.lock", "-of-0.lock")
                for other in self._path.glob("part-*.lock"):
                    if not other.name.endswith(same):
                        self._hold(stack, os.open(other, os.O_RDONLY), fcntl.LOCK_SH)
            yield

    def _hold(self, stack: contextlib.ExitStack, descriptor: int, kind: int) -> None:
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{self._path}: another process is packing to this folder; wait until it has ended"
            ) from None

    def prepare(self, plan: str, part: Part | None) -> None:
        plan_file = self._path / _PLAN
        if part:
            self._shards.mkdir(exist_ok=True)
            temporary = plan_file.with_name(f".{_PLAN}.{uuid.uuid4().hex}")
            temporary.write_text(plan, "utf-8")
            try:
                with contextlib.suppress(FileExistsError):  # another part was faster
                    os.link(temporary, plan_file)  # atomically
            finally:
                temporary.unlink()
            if plan_file.read_text("utf-8") != plan:
                raise _other_plan(self._path)
            return
        if not plan_file.exists() or plan_file.read_text("utf-8") != plan:
            for note in self._path.glob("*.json"):
                note.unlink()
            shutil.rmtree(self._shards, ignore_errors=True)
            self._shards.mkdir()
            write_atomically(plan_file, plan)
        for partial in self._shards.glob("*.partial"):
            partial.unlink()

    def check(self) -> None:
        """Does nothing, because the lock keeps other processes away."""

    def path(self, name: str) -> Path:
        return (self._shards / name).with_suffix(".partial")

    def finish(
        self, name: str, shard: Shard, table: Sequence[int], changes: Account
    ) -> FinishedShard:
        self.path(name).rename(self._shards / name)
        note = FinishedShard(shard=shard.model_copy(update={"name": name}), changes=changes)
        write_atomically(self._note(name), note.model_dump_json())
        return note

    def finished(self, name: str) -> FinishedShard | None:
        with contextlib.suppress(FileNotFoundError, ValidationError):
            note = FinishedShard.model_validate_json(self._note(name).read_bytes())
            if (self._shards / name).stat().st_size == note.shard.num_bytes:
                return note
        return None

    def publish(
        self, index: Index, expected_attributes: Mapping[str, object], account: Account
    ) -> Index:
        save_account(self._shards, account)
        index = publish(self._shards, self._directory, index, expected_attributes)
        shutil.rmtree(self._path, ignore_errors=True)  # another part may remove it, too
        return index

    def _note(self, name: str) -> Path:
        return self._path / f"{Path(name).stem}.json"


class _RemoteWork(WorkFolder):
    """`DEST/.packing/` with `plan.json`, and a description and the offsets of each shard.

    No lock is needed between processes with the same plan: an object appears only when it is
    complete, and a shard that two processes write has the same bytes. The descriptions are in a
    folder of the plan. A process with another plan replaces `plan.json`, which ends the others.
    """

    def __init__(self, directory: RemotePath) -> None:
        self._directory = directory
        self._packing = self._notes = directory / PACKING
        self._plan = b""

    def lock(self, part: Part | None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def prepare(self, plan: str, part: Part | None) -> None:
        self._plan = plan.encode()
        self._notes = self._packing / hashlib.sha256(self._plan).hexdigest()[:16]
        plan_file = self._packing / _PLAN
        with contextlib.suppress(FileExistsError):
            plan_file.write_bytes(self._plan, overwrite=False)
        if plan_file.read_bytes() == self._plan:
            return
        if part:
            raise _other_plan(self._packing)
        plan_file.write_bytes(self._plan)
        leftovers = filter(LEFTOVERS.fullmatch, self._directory.sizes())
        self._delete(name for name in leftovers if name != f"{PACKING}/{_PLAN}")

    def check(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if (self._packing / _PLAN).read_bytes() == self._plan:
                return
        raise SupersededError(
            f"{self._directory}: another process has started to pack something else to this "
            "folder; choose another folder"
        )

    def path(self, name: str) -> RemotePath:
        return self._directory / name

    def finish(
        self, name: str, shard: Shard, table: Sequence[int], changes: Account
    ) -> FinishedShard:
        self.check()
        note = FinishedShard(shard=shard, changes=changes, mark=self.path(name).mark())
        data = io.BytesIO()
        np.save(data, np.array(table, np.int64))
        (self._notes / f"{name}.npy").write_bytes(data.getvalue())
        (self._notes / f"{name}.json").write_bytes(note.model_dump_json().encode())
        return note

    def finished(self, name: str) -> FinishedShard | None:
        with contextlib.suppress(FileNotFoundError, ValidationError):
            note = FinishedShard.model_validate_json((self._notes / f"{name}.json").read_bytes())
            if self.path(name).mark() == note.mark:
                return note
        return None

    def all_finished(self, names: Sequence[str]) -> list[FinishedShard | None]:
        return list(storage.in_order(self.finished, names, self._directory))

    def publish(
        self, index: Index, expected_attributes: Mapping[str, object], account: Account
    ) -> Index:
        save_account(self._directory, account)
        if not index.compression:
            tables = storage.in_order(self._table, index.shards, self._directory)
            offsets.store(self._directory, index, np.concatenate([*tables]))
        try:
            (self._directory / INDEX_NAME).write_bytes(index_json(index), overwrite=False)
        except FileExistsError:  # another part was faster
            if existing := existing_index(self._directory, expected_attributes):
                index = existing
        self._delete(f"{PACKING}/{name}" for name in self._packing.sizes())
        return index

    def _table(self, shard: Shard) -> np.ndarray:
        data = (self._notes / f"{shard.name}.npy").read_bytes()
        table: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
        return table

    def _delete(self, names: Iterable[str]) -> None:
        def delete(name: str) -> None:
            (self._directory / name).unlink(missing_ok=True)

        for _ in storage.in_order(delete, names, self._directory):
            pass
