"""`python -m pipelines.check DIR`: checks that workers read each record once per epoch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt

from pipelines import storage
from pipelines.console import command_line
from pipelines.errors import DataError

_DESCRIPTION = """Reads a folder as several workers would, and compares the records with the
contents of the files: all workers together must read each record exactly once per epoch. Otherwise
the exit code is 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command_line.run(_parser(), _check, arguments)


def _check(
    directory: str, num_workers: int, batch_size: int, num_epochs: int, shuffle_buffer: int
) -> None:
    from pipelines.check.once_an_epoch import check

    epochs = check(
        storage.at(directory),
        num_workers=num_workers,
        batch_size=batch_size,
        num_epochs=num_epochs,
        shuffle_buffer=shuffle_buffer,
    )
    command_line.print_table(
        ("epoch", "worker", "records", "batches"),
        (
            (str(number), str(worker), f"{records:,}", f"{batches:,}")
            for number, epoch in enumerate(epochs, start=1)
            for worker, (records, batches) in enumerate(epoch.workers)
        ),
    )
    for epoch in epochs:
        if not epoch.is_exact:
            first = next(iter([*epoch.never_read, *epoch.read_again]))
            raise DataError(
                f"{directory}: {len(epoch.never_read)} records were never read, "
                f"{len(epoch.read_again)} were read again; the first is {first}"
            )
    num_records = sum(records for records, _ in epochs[0].workers)
    print(f"Each of {num_records:,} records was read exactly once in each of {num_epochs} epochs.")


def _parser() -> ArgumentParser:
    parser = command_line.parser("check", _DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="folder or URL with an index")
    parser.add_argument("--num-workers", type=PositiveInt, default=1, help="workers to simulate")
    parser.add_argument("--batch-size", type=PositiveInt, default=32, help="records per worker")
    parser.add_argument("--num-epochs", type=PositiveInt, default=2, help="epochs to read")
    parser.add_argument(
        "--shuffle-buffer", type=NonNegativeInt, default=1000, help="examples; 0 does not shuffle"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
