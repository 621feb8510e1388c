"""Packs a source into shards in parallel; an interrupt costs only the shards being written.

Each shard is one task. Its examples depend only on the source, the seed and the number of shards,
so that any process can write it. Finished shards are kept in a hidden working folder beside the
destination until all exist, and are then published together.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import ValidationError

from pipelines.console import parallel_tasks
from pipelines.errors import DataError
from pipelines.format.examples import encode
from pipelines.format.index import Index, Shard
from pipelines.format.record_file import Compression
from pipelines.sources import open_source
from pipelines.sources.source import Options, Source
from pipelines.writing.publish import ShardWriter, found_in, publish, shard_name, write_whole


@dataclass(frozen=True)
class Plan:
    """What to pack and how. The plan determines the bytes of every shard.

    Attributes:
        source: The source of the examples.
        num_shards: Number of files.
        seed: Seed of the order of the examples, or None for the order of the source.
        compression: Compression of the files.
    """

    source: Source
    num_shards: int
    seed: int | None
    compression: Compression

    @functools.cached_property
    def order(self) -> np.ndarray:
        """The numbers of the examples in the order in which the shards take them in turn."""
        numbers = np.arange(len(self.source))
        # PCG64 is named explicitly, because NumPy may change its default generator.
        if self.seed is not None:
            np.random.Generator(np.random.PCG64(self.seed)).shuffle(numbers)
        return numbers

    def numbers(self, shard: int) -> np.ndarray:
        """Returns the numbers of the examples of one shard."""
        return self.order[shard :: self.num_shards]

    @property
    def description(self) -> str:
        """The `source` of the index, which differs whenever the records would."""
        order = "in order" if self.seed is None else f"shuffled by seed {self.seed}"
        return f"{self.source.description}; {order}"

    def to_json(self) -> str:
        """Returns a text that is equal for plans that write the same shards."""
        wanted = self.wanted() | {"features": [f.model_dump() for f in self.source.features]}
        return json.dumps(wanted)

    def wanted(self) -> dict[str, object]:
        """Returns what the index of a folder packed by this plan contains."""
        return {
            "source": self.description,
            "features": self.source.features,
            "num_shards": self.num_shards,
            "compression": self.compression,
        }


_NUM_SAMPLES = 32
_LARGE, _SMALL = 100e6, 10e6  # bytes


def default_num_shards(source: Source) -> int:
    """Returns the number of shards of about 100 MB, or down to 10 MB to get ten of them.

    The rule is that of https://www.tensorflow.org/tutorials/load_data/tfrecord: enough files to
    read several at once, "each file should be at least 10 MB+ and ideally 100 MB+". The size is
    estimated from a fixed sample.

    Raises:
        DataError: An example of the sample cannot be read.
    """
    count = len(source)
    sample = list(range(0, count, -(-count // _NUM_SAMPLES)))
    sizes = [len(encode(example, source.features)) for example in source.examples(sample)]
    num_bytes = sum(sizes) / len(sizes) * count
    wanted = max(math.ceil(num_bytes / _LARGE), min(10, int(num_bytes / _SMALL)), 1)
    return min(wanted, count)


class WorkFolder:
    """The hidden working folder beside a destination, in which finished shards are kept.

    `.NAME.packing/plan.json` identifies the plan, and `shards/` contains the files. Beside it is a
    JSON description of each finished shard; a shard without one is not finished.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory.with_name(f".{directory.name}.packing")
        self.shards = self.path / "shards"

    @contextlib.contextmanager
    def sole_use(self) -> Iterator[None]:
        """Locks the folder. The system releases the lock when the process ends for any reason.

        Raises:
            DataError: Another process holds the lock.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise DataError(
                f"{self.path}: another process is packing to this folder; wait until it has ended"
            ) from None
        finally:
            os.close(descriptor)

    def prepare(self, plan: str) -> None:
        """Removes files that belong to another plan or are not finished."""
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
        """Removes the folder with its contents."""
        shutil.rmtree(self.path)


def _finish(partial: Path, path: Path, shard: Shard) -> Shard:
    """Renames a complete shard to its final name and writes its description."""
    partial.rename(path)
    shard = shard.model_copy(update={"name": path.name})
    write_whole(_note(path), shard.model_dump_json())
    return shard


def _finished(path: Path) -> Shard | None:
    """Returns the description of a finished shard, or None if it is not finished."""
    with contextlib.suppress(FileNotFoundError, ValidationError):
        shard = Shard.model_validate_json(_note(path).read_bytes())
        if path.stat().st_size == shard.num_bytes:
            return shard
    return None


def _note(path: Path) -> Path:
    return path.parent.with_name(f"{path.stem}.json")


_NUM_BETWEEN_REPORTS = 50


class _ShardTask(NamedTuple):
    """One shard to write: its file and the numbers of its examples."""

    path: Path
    numbers: np.ndarray


def pack(plan: Plan, directory: Path, num_workers: int) -> Index:
    """Packs examples into a folder of shards, unless it already contains them.

    Args:
        plan: What to pack.
        directory: The folder to create, with its parents.
        num_workers: Number of processes that write.

    Returns:
        The index of the folder.

    Raises:
        DataError: An example cannot be read or stored, the folder contains something else, another
            process is packing it, or the disk is full. Finished shards are kept.
    """
    if plan.num_shards > len(plan.source):
        raise DataError(
            f"--num-shards: expected at most the number of examples, {len(plan.source)}, got "
            f"{plan.num_shards}"
        )
    directory = directory.absolute()
    if found := found_in(directory, plan.wanted()):
        return found
    work = WorkFolder(directory)
    with _full_disk_explained(directory), work.sole_use():
        work.prepare(plan.to_json())
        shards = _shards(plan, work.shards, num_workers)
        index = Index(
            source=plan.description,
            features=plan.source.features,
            compression=plan.compression,
            shards=shards,
        )
        index = publish(work.shards, directory, index, plan.wanted())
        work.remove()
    return index


def _shards(plan: Plan, folder: Path, num_workers: int) -> tuple[Shard, ...]:
    """Writes the missing shards and returns the descriptions of all."""
    paths = [folder / shard_name(i, plan.num_shards) for i in range(plan.num_shards)]
    shards = {path: _finished(path) for path in paths}
    tasks = [
        _ShardTask(path, plan.numbers(i)) for i, path in enumerate(paths) if shards[path] is None
    ]
    written = parallel_tasks.run(
        functools.partial(_write_shard, plan.source, plan.compression),
        tasks,
        num_workers=num_workers,
        description=f"packing {len(tasks)} of {len(paths)} shards",
        num_records=sum(len(task.numbers) for task in tasks),
    )
    shards |= {task.path: shard for task, shard in zip(tasks, written, strict=True)}
    return tuple(shard for shard in shards.values() if shard)


def _write_shard(
    source: Source, compression: Compression, task: _ShardTask, advance: parallel_tasks.Advance
) -> Shard:
    """Writes one shard, which gets its final name when it is complete and flushed to disk."""
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
    return _finish(partial, task.path, writer.shard)


@contextlib.contextmanager
def _full_disk_explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(
            f"{directory}: {error.strerror}; free some space and run the same command again: "
            "finished shards are kept"
        ) from None


def packed(
    location: str,
    directory: str | Path,
    *,
    kind: str = "auto",
    num_shards: int | None = None,
    seed: int | None = 0,
    compression: Compression = "",
    num_workers: int | None = None,
    **of_source: object,
) -> Index:
    """Packs a data set into a folder of shards, unless the folder already contains it.

    Args:
        location: A folder, a file or `tfds:NAME`.
        directory: The folder to create, with its parents.
        kind: One of `pipelines.sources.SOURCES`, or `auto` to detect it.
        num_shards: Number of files; None: as many as make them 100 MB each.
        seed: Seed of the order of the examples; None: the order of the source.
        compression: Compression of the files.
        num_workers: Number of processes that write; None: one per core.
        **of_source: Options of some sources, see `pipelines.sources.source.Options`.

    Returns:
        The index of the folder.

    Raises:
        DataError: The source cannot be packed, or the folder contains something else.
    """
    source = open_source(location, kind, Options.model_validate(of_source))
    plan = Plan(
        source,
        num_shards=num_shards or default_num_shards(source),
        seed=seed,
        compression=compression,
    )
    return pack(plan, Path(directory), num_workers or parallel_tasks.default_num_workers())
