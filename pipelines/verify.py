"""`python -m pipelines.verify DIR`: finds all damaged records of a folder, a task per shard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from pipelines import storage
from pipelines.console import command_line, parallel_tasks
from pipelines.cores import num_cores
from pipelines.errors import DataError
from pipelines.format import offsets, record_file
from pipelines.format.encoding import find_problem, parse_message
from pipelines.format.feature import Feature
from pipelines.format.index import Index, Shard, load_index, sha256_of
from pipelines.format.record_file import Compression, Record
from pipelines.storage import AnyPath

_NUM_AT_ONCE = 32
_DESCRIPTION = """Checks every record of a folder: its checksums, that it matches the features of
the index and, with --decode, that its images can be decoded. Prints file and byte offset of each
damaged record and exits with 1 if there is one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command_line.run(_parser(), _verify, arguments)


def _verify(directory: str, decode: bool = False, num_workers: int | None = None) -> None:
    findings = verify(storage.at(directory), decode=decode, num_workers=num_workers or num_cores())
    problems = [f"{shard.path}: {problem}" for shard in findings for problem in shard.problems]
    for problem in problems:
        print(problem)
    command_line.print_facts(
        {
            "folder": directory,
            "shards": str(len(findings)),
            "records": f"{sum(shard.num_records for shard in findings):,}",
            "checked": "checksums, features" + (", decoding" if decode else ""),
            "problems": str(len(problems)),
        }
    )
    if problems:
        bad = sum(bool(shard.problems) for shard in findings)
        raise DataError(
            f"{directory}: problems: {len(problems)}, in {bad} of {len(findings)} shards; restore "
            "these files or write the data again"
        )


def _parser() -> ArgumentParser:
    parser = command_line.parser("verify", _DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="folder or URL with an index")
    parser.add_argument("--decode", action="store_true", help="also decode the images")
    parser.add_argument(
        "--num-workers", type=PositiveInt, metavar="N", help="processes; default: one per core"
    )
    return parser


@dataclass
class Findings:
    """The result of checking one shard.

    Attributes:
        path: The file.
        num_records: Number of records read, including damaged ones.
        problems: Descriptions of damaged records, with their offsets, and of the whole file.
    """

    path: AnyPath
    num_records: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, record: Record, problem: str) -> None:
        """Adds the problem of a record."""
        self.problems.append(f"record at byte {record.offset}: {problem}")


class _Task(NamedTuple):
    path: AnyPath
    shard: Shard
    features: tuple[Feature, ...]
    compression: Compression
    decode: bool


def verify(directory: AnyPath, *, decode: bool, num_workers: int) -> list[Findings]:
    """Checks the records of a folder, and its shards against the index.

    Returns:
        The findings of each shard, in the order of the index.

    Raises:
        DataError: The folder has no index.
    """
    index: Index = load_index(directory)
    tasks = [
        _Task(directory / shard.name, shard, index.features, index.compression, decode)
        for shard in index.shards
    ]
    findings = parallel_tasks.run(
        _check,
        tasks,
        num_workers=num_workers,
        description=f"checking {len(tasks)} shards",
        num_records=index.num_records,
    )
    first: dict[str, str] = {}
    mismatches = offsets.mismatches(directory, index)
    for shard, findings_of_shard in zip(index.shards, findings, strict=True):
        if shard.name in mismatches:
            name = offsets.OFFSETS_NAME
            findings_of_shard.problems.append(f"{name} does not match this shard; delete {name}")
        name = first.setdefault(shard.sha256, shard.name)
        if name != shard.name and shard.num_records:
            findings_of_shard.problems.append(
                f"has the same content as {name}: records would be read twice"
            )
    return findings


def _check(task: _Task, advance: parallel_tasks.Advance) -> Findings:
    """Checks one shard. Problems are returned, not raised."""
    findings = Findings(task.path)
    try:
        num_bytes = storage.num_bytes(task.path)
        _check_records(task, findings, advance)
        shard = task.shard
        if num_bytes != shard.num_bytes:
            findings.problems.append(f"the index lists {shard.num_bytes} bytes, found {num_bytes}")
        if findings.num_records != shard.num_records:
            findings.problems.append(
                f"the index lists {shard.num_records} records, read {findings.num_records}"
            )
        # Only if nothing else was found, because a checksum does not show what is different.
        if not findings.problems and sha256_of(task.path) != shard.sha256:
            findings.problems.append("SHA-256 differs from the index: this is another file")
    except DataError as error:  # of an object store
        findings.problems.append(str(error))
    except OSError as error:
        findings.problems.append(error.strerror or str(error))
    return findings


def _check_records(task: _Task, findings: Findings, advance: parallel_tasks.Advance) -> None:
    unread: list[Record] = []  # records without a problem so far, not decoded yet
    for record in record_file.records(task.path, task.compression):
        findings.num_records += 1
        problem = record.problem
        if problem is None:
            try:
                problem = find_problem(parse_message(record.data, "data"), task.features)
            except DataError as error:
                problem = str(error)
        if problem is None:
            unread.append(record)
        else:
            findings.add(record, problem)
        if findings.num_records % _NUM_AT_ONCE == 0:
            _read(unread, task, findings)
            unread = []
            advance(_NUM_AT_ONCE)
    _read(unread, task, findings)
    advance(findings.num_records % _NUM_AT_ONCE)


def _read(records: Sequence[Record], task: _Task, findings: Findings) -> None:
    """Decodes records as reading does: TensorFlow's parser rejects some that others accept."""
    if not records or (not task.decode and _can_be_read([r.data for r in records], task)):
        return
    for record in records:
        if not _can_be_read(record.data, task):
            findings.add(record, "TensorFlow cannot decode it")


def _can_be_read(data: bytes | list[bytes], task: _Task) -> bool:
    import tensorflow as tf

    from pipelines.format.examples import decode

    try:
        decode(tf.constant(data), task.features, decode_images=task.decode)
    except (tf.errors.OpError, UnicodeDecodeError):  # messages may quote undecodable bytes
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
