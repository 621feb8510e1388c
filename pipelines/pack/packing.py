"""Packing in parallel, so that an interrupt costs the shards in hand and no others.

Finished shards wait in a working folder; when all are there, they are published together.
"""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipelines.console import parallel_tasks
from pipelines.errors import DataError
from pipelines.format.compression import Compression
from pipelines.format.index import Index, Shard
from pipelines.pack.plan import Plan
from pipelines.pack.work_folder import WorkFolder, finish, finished
from pipelines.sources.source import Source
from pipelines.writing.publish import found_in, publish
from pipelines.writing.shard_file import ShardWriter, shard_name

_NUM_BETWEEN_REPORTS = 50


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
    """Writes the shards that are missing, and returns what all of them hold."""
    paths = [folder / shard_name(i, plan.num_shards) for i in range(plan.num_shards)]
    shards = {path: finished(path) for path in paths}
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
    """Writes one shard; its final name appears when it is whole and on the disk."""
    # Imports TensorFlow, for which the process that only hands out the tasks need not wait.
    from pipelines.format.encode import encode

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
    return finish(partial, task.path, writer.shard)


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
