"""Packing in parallel, so that an interrupt costs the shards in hand and no others.

Finished shards wait in a hidden folder beside the destination (`.NAME.packing`), each with a note
of what it holds; the folder's plan tells whether they are of the same data and options. When all
are there, they are published together.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import ValidationError

from pipelines import parallel
from pipelines.errors import DataError
from pipelines.index import Compression, Index, Shard
from pipelines.publish import found_in, publish, write_whole
from pipelines.shard_file import ShardWriter, shard_name
from pipelines.sources.source import Source

_NUM_BETWEEN_REPORTS = 50


@dataclass(frozen=True)
class Plan:
    """What is to be packed and how; the records follow from it to the last bit.

    Attributes:
        source: of the examples.
        num_shards: files to deal them out to.
        seed: of the order in which they are dealt out, or None for the order of the source.
        compression: of the files.
    """

    source: Source
    num_shards: int
    seed: int | None
    compression: Compression

    @functools.cached_property
    def order(self) -> np.ndarray:
        """The numbers of the examples in the order in which they are dealt out."""
        numbers = np.arange(len(self.source))
        # PCG64 by name: NumPy may change what default_rng is.
        if self.seed is not None:
            np.random.Generator(np.random.PCG64(self.seed)).shuffle(numbers)
        return numbers

    @property
    def description(self) -> str:
        """Goes into the index: differs whenever the records would."""
        order = "in order" if self.seed is None else f"shuffled by seed {self.seed}"
        return f"{self.source.description}; {order}"

    def wanted(self) -> dict[str, object]:
        """What the index of a folder packed by this plan holds."""
        return {
            "source": self.description,
            "features": self.source.features,
            "num_shards": self.num_shards,
            "compression": self.compression,
        }


class _ShardTask(NamedTuple):
    """One shard to write: its file, and the numbers of the examples that belong into it."""

    path: Path
    numbers: np.ndarray


def pack(plan: Plan, directory: Path, num_workers: int) -> Index:
    """Packs examples into a folder of shards, or re-uses what is there already.

    Args:
        plan: what to pack.
        directory: the folder to make; its parents are made too.
        num_workers: processes that write.

    Returns:
        The index of the folder.

    Raises:
        DataError: an example cannot be read or does not fit, the folder holds something else,
            another process is packing it, or the disk is full. What is finished is kept, nothing
            torn is ever visible.
    """
    if plan.num_shards > len(plan.source):
        raise DataError(
            f"--num-shards: expected at most the {len(plan.source)} examples there are, got "
            f"{plan.num_shards}"
        )
    directory = directory.absolute()
    if found := found_in(directory, plan.wanted()):
        return found
    work = directory.with_name(f".{directory.name}.packing")
    with _full_disk_explained(directory), _sole_use_of(work):
        shards = _shards(plan, _prepared(work, plan), num_workers)
        index = Index(
            source=plan.description,
            features=plan.source.features,
            compression=plan.compression,
            shards=shards,
        )
        index = publish(work / "shards", directory, index, plan.wanted())
        shutil.rmtree(work)
    return index


def _shards(plan: Plan, work: Path, num_workers: int) -> tuple[Shard, ...]:
    """Writes the shards that are missing, and returns what all of them hold."""
    paths = [work / "shards" / shard_name(i, plan.num_shards) for i in range(plan.num_shards)]
    tasks = [
        _ShardTask(path, plan.order[i :: plan.num_shards])
        for i, path in enumerate(paths)
        if _finished(path) is None
    ]
    written = iter(
        parallel.run(
            functools.partial(_write_shard, plan.source, plan.compression),
            tasks,
            num_workers=num_workers,
            description=f"packing {len(tasks)} of {len(paths)} shards",
            num_records=sum(len(task.numbers) for task in tasks),
        )
    )
    missing = {task.path for task in tasks}
    return tuple(
        next(written) if path in missing else Shard.model_validate_json(_note(path).read_bytes())
        for path in paths
    )


def _write_shard(
    source: Source, compression: Compression, task: _ShardTask, advance: parallel.Advance
) -> Shard:
    """Writes one shard; its final name appears when it is whole and on the disk."""
    # Imports TensorFlow, for which the process that only hands out the tasks need not wait.
    from pipelines.schema import encode

    partial = task.path.with_suffix(".partial")
    num_since_report = 0
    with ShardWriter(partial, compression) as writer:
        for example in source.examples(task.numbers.tolist()):
            writer.write(encode(example, source.features))
            num_since_report += 1
            if num_since_report == _NUM_BETWEEN_REPORTS:
                advance(num_since_report)
                num_since_report = 0
    advance(num_since_report)
    partial.rename(task.path)
    shard = writer.shard.model_copy(update={"name": task.path.name})
    write_whole(_note(task.path), shard.model_dump_json())
    return shard


def _note(path: Path) -> Path:
    """Where it is written what a finished shard holds."""
    return path.parent.with_name(f"{path.stem}.json")


def _finished(path: Path) -> Shard | None:
    """What an earlier start has finished of this shard."""
    with contextlib.suppress(FileNotFoundError, ValidationError):
        shard = Shard.model_validate_json(_note(path).read_bytes())
        if path.stat().st_size == shard.num_bytes:
            return shard
    return None


def _prepared(work: Path, plan: Plan) -> Path:
    """The working folder, emptied of what belongs to another plan or was not finished."""
    plan_file, shards = work / "plan.json", work / "shards"
    wanted = json.dumps(plan.wanted(), default=lambda feature: feature.model_dump(), sort_keys=True)
    if not plan_file.exists() or plan_file.read_text("utf-8") != wanted:
        for path in work.glob("*.json"):
            path.unlink()
        shutil.rmtree(shards, ignore_errors=True)
        shards.mkdir()
        write_whole(plan_file, wanted)
    for partial in shards.glob("*.partial"):
        partial.unlink()
    return work


@contextlib.contextmanager
def _full_disk_explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(
            f"{directory}: {error.strerror}; make room and start again with the same options: "
            "finished shards are kept"
        ) from None


@contextlib.contextmanager
def _sole_use_of(work: Path) -> Iterator[None]:
    """Locks the working folder, which the system undoes when the process ends, however it does."""
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DataError(f"{work}: another process is packing here; wait for it to end") from None
    finally:
        os.close(descriptor)
