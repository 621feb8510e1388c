"""`python -m pipelines.index DIR`: creates the index of shards that other tools wrote."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt
from pydantic import TypeAdapter, ValidationError

from pipelines import storage
from pipelines.console import command_line
from pipelines.cores import num_cores
from pipelines.errors import DataError
from pipelines.format import offsets
from pipelines.format.feature import Feature
from pipelines.format.index import INDEX_NAME
from pipelines.sources.account import Account, print_account, save_account
from pipelines.sources.source import list_again, listing
from pipelines.storage import AnyPath
from pipelines.writing import write_index

#: Files of tensorflow-datasets and of this package, which are no data.
_METADATA = re.compile(r"(features|dataset_info|account)\.json|.*\.labels\.txt|offsets\.npz")

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
    strict: bool = False,
) -> None:
    from pipelines.index.scan import link_shards, make_index

    folder, target = storage.at(directory), storage.at(to or directory)
    if isinstance(folder, Path) != isinstance(target, Path):
        raise DataError("--to: expected a folder on the same disk or in the same bucket as DIR")
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; check the path")
    if (target / INDEX_NAME).is_file():
        raise DataError(f"{target / INDEX_NAME}: exists already; delete it to create it again")
    matching: Sequence[AnyPath]
    if isinstance(folder, Path):
        matching = sorted(path for path in folder.glob(files) if path.is_file())
    else:
        names = sorted(fnmatch.filter(folder.sizes(), files))
        matching = [folder / name for name in names if "/" not in name]
    shards = [path for path in matching if not path.name.startswith(".")]
    if not shards:
        raise DataError(f"{folder}: no file matches {files!r}; select files with --files")
    declared = _declared(Path(features)) if features else ()
    list_again()
    below, account = listing(folder), Account()
    account.use("files", len(shards))
    names = [str(storage.relative(path, folder)) for path in below.files if path not in shards]
    others = [name for name in names if not _METADATA.fullmatch(name)]
    account.leave_out("files", f"does not match --files {files!r}", *others)
    account.add_clutter("files", below.num_clutter)
    index, table = make_index(shards, target, declared, num_workers or num_cores(), account)
    if strict:
        account.check_strict()
    if isinstance(target, Path):
        target.mkdir(parents=True, exist_ok=True)
    link_shards(index, shards, target)
    if not index.compression:
        offsets.store(target, index, table)
    save_account(target, account)
    write_index(target, index)
    command_line.print_summary(index, target)
    print_account(target)


def _declared(path: Path) -> tuple[Feature, ...]:
    try:
        return TypeAdapter(tuple[Feature, ...]).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"{path}: not a list of features: {where}: {first['msg']}") from None


def _parser() -> ArgumentParser:
    parser = command_line.parser("index", _DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="folder or URL of the shards")
    parser.add_argument(
        "--files",
        metavar="PATTERN",
        default="*.tfrec*",
        help="pattern of file names, such as '*-train.tfrecord*'",
    )
    parser.add_argument(
        "--to",
        metavar="FOLDER",
        help="folder for the index, if DIR contains several data sets; gets links to the shards, "
        "or copies of them in a bucket",
    )
    parser.add_argument(
        "--features",
        metavar="FILE",
        help="JSON list of features that cannot be inferred, in the format of index.json",
    )
    parser.add_argument(
        "--num-workers", type=PositiveInt, metavar="N", help="processes; default: one per core"
    )
    parser.add_argument(
        "--strict", action="store_true", help="fail if a file of the folder is left out"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
