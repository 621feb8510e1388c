"""`python -m tests.studies.attacks`: runs attacks, and prints the outcome of each."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.studies.attacks import table
from tfdist.console import tables

_WIDTH = 90


def main() -> int:
    """Runs what the flags say; returns 1 if an attack was not answered as expected."""
    chosen = _flags()
    results = list(_rows(chosen.what, chosen.strategy))
    tables.numbers(
        ("attack", "expected", "seen", "as expected"),
        [
            (row.attack, row.expected, row.seen[:_WIDTH], "yes" if row.passed else "NO")
            for row in results
        ],
        num_names=4,
    )
    return int(not all(row.passed for row in results))


def _rows(what: list[str], strategies: list[str]) -> Iterator[table.Row]:
    if "workers" in what:
        for strategy in strategies:
            yield from table.of_workers(strategy)
    if "tests" in what:
        with tempfile.TemporaryDirectory(prefix="tfdist-attacks-") as folder:
            yield from table.of_tests(Path(folder))


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.studies.attacks", description=__doc__)
    add = parser.add_argument
    add("what", nargs="*", default=["workers", "tests"], metavar="workers|tests")
    add(
        "--strategy", nargs="+", default=["horovod", "multi_worker"],
        choices=["horovod", "multi_worker"], help="of the two workers (both)",
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
