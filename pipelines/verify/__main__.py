"""`python -m pipelines.verify DIR`: checks every record of a folder of shards."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from pipelines import storage
from pipelines.console import command_line
from pipelines.cores import num_cores
from pipelines.errors import DataError

_DESCRIPTION = """Checks every record of a folder: its checksums, that it matches the features of
the index and, with --decode, that its images can be decoded. Prints file and byte offset of each
damaged record and exits with 1 if there is one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command_line.run(_parser(), _verify, arguments)


def _verify(directory: str, decode: bool = False, num_workers: int | None = None) -> None:
    from pipelines.verify.shards import verify

    findings = verify(
        storage.at(directory),
        decode=decode,
        num_workers=num_workers or num_cores(),
    )
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


if __name__ == "__main__":
    sys.exit(main())
