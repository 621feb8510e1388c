"""Packs a source into shards in parallel; an interrupt costs only the shards being written.

Each shard is one task. Its examples depend only on the source, the seed and the number of shards,
so that any process can write it. Finished shards are kept in a hidden working folder beside the
destination until all exist, and are then published together.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from pipelines import storage
from pipelines.console import parallel_tasks, ray_tasks
from pipelines.cores import num_cores
from pipelines.errors import DataError
from pipelines.format.encoding import encode
from pipelines.format.index import Index
from pipelines.format.record_file import Compression
from pipelines.pack.parts import Part
from pipelines.pack.work_folder import FinishedShard, SupersededError, WorkFolder, work_folder
from pipelines.sources import open_source
from pipelines.sources.account import Account, load_account
from pipelines.sources.source import Options, Source
from pipelines.storage import AnyPath
from pipelines.writing import ShardWriter, existing_index, explain_full_disk, shard_name


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
        """The numbers of the examples; shard i gets every `num_shards`-th of them from i on."""
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
        """The `source` of the index, which is different for different records."""
        order = "in order" if self.seed is None else f"shuffled by seed {self.seed}"
        return f"{self.source.description}; {order}"

    def to_json(self) -> str:
        """Returns a text that is equal for plans that write the same shards."""
        fields = self.index_fields() | {"features": [f.model_dump() for f in self.source.features]}
        return json.dumps(fields)

    def index_fields(self) -> dict[str, object]:
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
    """Returns a number of shards for which each has about 100 MB.

    Small data sets get up to ten shards of at least 10 MB, so that several can be read at once.
    This is the rule of https://www.tensorflow.org/tutorials/load_data/tfrecord. The size is
    estimated from a fixed sample.

    Raises:
        DataError: An example of the sample cannot be read.
    """
    num_bytes = _encode_sample(source) * len(source)
    num_shards = max(math.ceil(num_bytes / _LARGE), min(10, int(num_bytes / _SMALL)), 1)
    return min(num_shards, len(source))


#: Seconds of processor time for which another process is worth starting.
_SECONDS_OF_WORKER = 2


def default_num_workers(source: Source) -> int:
    """Returns a number of processes, up to the cores, that pack faster than fewer would."""
    begin = time.process_time()  # other programs do not make it more
    _encode_sample(source)
    seconds = (time.process_time() - begin) * len(source) / min(len(source), _NUM_SAMPLES)
    return max(min(int(seconds / _SECONDS_OF_WORKER), num_cores()), 1)


def _encode_sample(source: Source) -> float:
    numbers = list(range(0, len(source), -(-len(source) // _NUM_SAMPLES)))
    sizes = [len(encode(example, source.features)) for example in source.examples(numbers)]
    return sum(sizes) / max(len(sizes), 1)


_NUM_BETWEEN_REPORTS = 50


class _ShardTask(NamedTuple):
    name: str
    numbers: np.ndarray


def pack(
    plan: Plan,
    directory: AnyPath,
    num_workers: int | None,
    *,
    part: Part | None = None,
    finish: bool = False,
    by_ray: bool = False,
    strict: bool = False,
) -> Index | None:
    """Packs examples into a folder of shards, unless it already contains them.

    Args:
        plan: What to pack.
        directory: The folder to create, with its parents.
        num_workers: Number of processes that write; None: chosen by the work.
        part: Write the shards of this part only. Whichever process finds that all shards exist
            publishes the folder.
        finish: Write nothing, and publish the shards of all parts.
        by_ray: Whether the cores of a Ray cluster write, instead of processes of this machine.
        strict: Whether anything that is left out or guessed is an error.

    Returns:
        The index of the folder, or None if shards of other parts are missing.

    Raises:
        DataError: An example cannot be read or stored, the folder contains something else, another
            process is packing it, the disk is full, or shards are missing that `finish` needs.
            Finished shards are kept.
    """
    if plan.num_shards > len(plan.source):
        raise DataError(
            f"--num-shards: expected at most the number of examples, {len(plan.source)}, got "
            f"{plan.num_shards}"
        )
    if isinstance(directory, Path):
        directory = directory.absolute()
    account = plan.source.account
    if strict:
        account.check_strict()
    if existing := existing_index(directory, plan.index_fields()):
        if strict:
            load_account(directory).check_strict()
        return existing
    work = work_folder(directory)
    # Finishing shares the folder with parts: it only needs that nobody packs it as a whole.
    part = Part(0, 0) if finish else part
    again = "run the same command again: finished shards are kept"
    with explain_full_disk(directory, again), work.lock(part):
        work.prepare(plan.to_json(), part)
        try:
            if not finish:
                _write_missing(plan, work, num_workers, part, by_ray)
        except SupersededError:
            if existing := existing_index(directory, plan.index_fields()):
                return existing
            raise
        names = [shard_name(i, plan.num_shards) for i in range(plan.num_shards)]
        notes = work.all_finished(names)
        if missing := [name for name, note in zip(names, notes, strict=True) if note is None]:
            if finish:
                raise DataError(
                    f"{directory}: {len(missing)} of {len(names)} shards are missing, the first is "
                    f"{missing[0]}; run the parts that failed again"
                )
            # Another process may have published the data set.
            existing = existing_index(directory, plan.index_fields())
            if existing is None and part is None:
                raise DataError(f"{directory}: shards vanished while they were packed; start again")
            return existing
        account = account.model_copy(deep=True)
        for note in filter(None, notes):
            account.merge(note.changes)
        if strict:
            account.check_strict()
        index = Index(
            source=plan.description,
            features=plan.source.features,
            compression=plan.compression,
            shards=tuple(note.shard for note in notes if note),
        )
        return work.publish(index, plan.index_fields(), account)


def _write_missing(
    plan: Plan, work: WorkFolder, num_workers: int | None, part: Part | None, by_ray: bool
) -> None:
    names = {i: shard_name(i, plan.num_shards) for i in range(plan.num_shards)}
    if part:
        names = {i: name for i, name in names.items() if i % part.num_parts == part.number}
    finished = work.all_finished([*names.values()])
    tasks = [
        _ShardTask(name, plan.numbers(i))
        for (i, name), note in zip(names.items(), finished, strict=True)
        if note is None
    ]
    write = functools.partial(_write_shard, plan.source, plan.compression, work)
    if by_ray:
        ray_tasks.run(write, tasks)
        return
    parallel_tasks.run(
        write,
        tasks,
        num_workers=num_workers or (default_num_workers(plan.source) if len(tasks) > 1 else 1),
        description=f"packing {len(tasks)} of {len(names)} shards",
        num_records=sum(len(task.numbers) for task in tasks),
    )


def _write_shard(
    source: Source,
    compression: Compression,
    work: WorkFolder,
    task: _ShardTask,
    advance: parallel_tasks.Advance,
) -> FinishedShard:
    work.check()
    source.changes = Account()
    num_since_report = 0
    with ShardWriter(work.path(task.name), compression) as writer:
        for example in source.examples(task.numbers.tolist()):
            writer.write(encode(example, source.features))
            num_since_report += 1
            if num_since_report == _NUM_BETWEEN_REPORTS:
                advance(num_since_report)
                num_since_report = 0
    advance(num_since_report)
    return work.finish(task.name, writer.shard, writer.offsets, source.changes)


def pack_dataset(
    location: str,
    directory: str | AnyPath,
    *,
    kind: str = "auto",
    num_shards: int | None = None,
    seed: int | None = 0,
    compression: Compression = "",
    num_workers: int | None = None,
    strict: bool = False,
    **source_options: object,
) -> Index:
    """Packs a data set into a folder of shards, unless the folder already contains it.

    Example:
        >>> np.savez("digits.npz", image=x, label=y)
        >>> index = pipelines.pack_dataset("digits.npz", "data/packed", num_workers=1)
        >>> index.num_records
        1797

    Args:
        location: A folder, a file or `tfds:NAME`.
        directory: The folder to create, with its parents, or its URL.
        kind: One of `pipelines.sources.SOURCES`, or `auto` to detect it.
        num_shards: Number of files; None: as many as give files of about 100 MB.
        seed: Seed of the order of the examples; None: the order of the source.
        compression: Compression of the files.
        num_workers: Number of processes that write; None: chosen by the work, up to the cores.
        strict: Whether anything that is left out or guessed is an error.
        **source_options: Options of some sources, see `pipelines.sources.source.Options`.

    Returns:
        The index of the folder.

    Raises:
        DataError: The source cannot be packed, or the folder contains something else.
    """
    plan = make_plan(location, kind, num_shards, seed, compression, source_options)
    return cast(Index, pack(plan, storage.at(directory), num_workers, strict=strict))


def make_plan(
    location: str,
    kind: str,
    num_shards: int | None,
    seed: int | None,
    compression: Compression,
    source_options: Mapping[str, object],
) -> Plan:
    """Returns the plan for the arguments of `pack_dataset`."""
    source = open_source(location, kind, Options.model_validate(source_options))
    return Plan(
        source,
        num_shards=num_shards or default_num_shards(source),
        seed=seed,
        compression=compression,
    )
