"""`python -m pipelines.index DIR`: creates the index of shards that other tools wrote."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt
from pydantic import TypeAdapter, ValidationError

from pipelines.console import command_line, parallel_tasks
from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.format.index import INDEX_NAME
from pipelines.storage import is_url
from pipelines.writing.publish import write_index

_DESCRIPTION = """Creates the index of TFRecord shards that tensorflow-datasets or another tool
wrote. Reads every record, verifies its checksums, and infers its features."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command_line.run(_parser(), _make, arguments)


def _make(
    directory: str,
    files: str,
    to: str | None = None,
    features: str | None = None,
    num_workers: int | None = None,
) -> None:
    from pipelines.index.scan import link_outside, make_index

    if is_url(directory) or (to and is_url(to)):
        raise DataError("index: expected local folders; create the index locally and upload it")
    folder, target = Path(directory), Path(to or directory)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; check the path")
    if (target / INDEX_NAME).exists():
        raise DataError(f"{target / INDEX_NAME}: exists already; delete it to create it again")
    shards = sorted(p for p in folder.glob(files) if p.is_file() and not p.name.startswith("."))
    if not shards:
        raise DataError(f"{folder}: no file matches {files!r}; select files with --files")
    declared = _declared(Path(features)) if features else ()
    index = make_index(
        shards, target.resolve(), declared, num_workers or parallel_tasks.default_num_workers()
    )
    target.mkdir(parents=True, exist_ok=True)
    link_outside(index, shards, target)
    write_index(target, index)
    command_line.print_summary(index, target)


def _declared(path: Path) -> tuple[Feature, ...]:
    try:
        return TypeAdapter(tuple[Feature, ...]).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"{path}: not a list of features: {where}: {first['msg']}") from None


def _parser() -> ArgumentParser:
    parser = command_line.parser("index", _DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="folder of the shards")
    parser.add_argument(
        "--files",
        metavar="PATTERN",
        default="*.tfrec*",
        help="pattern of file names, such as '*-train.tfrecord*'",
    )
    parser.add_argument(
        "--to", metavar="FOLDER", help="folder for the index, if DIR contains several data sets"
    )
    parser.add_argument(
        "--features",
        metavar="FILE",
        help="JSON list of features that cannot be inferred, in the format of index.json",
    )
    parser.add_argument(
        "--num-workers", type=PositiveInt, metavar="N", help="processes; default: one per core"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
