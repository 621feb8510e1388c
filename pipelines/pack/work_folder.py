"""Where finished shards wait until all are there: a hidden folder beside the destination.

`.NAME.packing/plan.json` tells what is being packed, `shards/` holds the files, and beside it lies
a note of what each finished one holds. A shard without a note is not finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from pipelines.errors import DataError
from pipelines.format.index import Shard
from pipelines.writing.publish import write_whole


class WorkFolder:
    """The working folder of a destination."""

    def __init__(self, directory: Path) -> None:
        self.path = directory.with_name(f".{directory.name}.packing")
        self.shards = self.path / "shards"

    @contextlib.contextmanager
    def sole_use(self) -> Iterator[None]:
        """Locks the folder, which the system undoes when the process ends, however it does.

        Raises:
            DataError: another process has it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise DataError(
                f"{self.path}: another process is packing here; wait for it to end"
            ) from None
        finally:
            os.close(descriptor)

    def prepare(self, plan: str) -> None:
        """Empties the folder of what belongs to another plan or was not finished."""
        plan_file = self.path / "plan.json"
        if not plan_file.exists() or plan_file.read_text("utf-8") != plan:
            for note in self.path.glob("*.json"):
                note.unlink()
            shutil.rmtree(self.shards, ignore_errors=True)
            self.shards.mkdir()
            write_whole(plan_file, plan)
        for partial in self.shards.glob("*.partial"):
            partial.unlink()

    def remove(self) -> None:
        """Removes the folder and what is in it."""
        shutil.rmtree(self.path)


def finish(partial: Path, path: Path, shard: Shard) -> Shard:
    """Gives a shard that is whole and on the disk its name, and notes what it holds."""
    partial.rename(path)
    shard = shard.model_copy(update={"name": path.name})
    write_whole(_note(path), shard.model_dump_json())
    return shard


def finished(path: Path) -> Shard | None:
    """What is noted of a shard, or None if it is not finished."""
    with contextlib.suppress(FileNotFoundError, ValidationError):
        shard = Shard.model_validate_json(_note(path).read_bytes())
        if path.stat().st_size == shard.num_bytes:
            return shard
    return None


def _note(path: Path) -> Path:
    return path.parent.with_name(f"{path.stem}.json")
