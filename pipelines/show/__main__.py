"""`python -m pipelines.show DIR`: prints features and label counts, and draws a contact sheet."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt

from pipelines import storage
from pipelines.console import command_line
from pipelines.format.index import load_index
from pipelines.sources.account import print_account

_DESCRIPTION = """Shows the contents of a folder: its features, its first record, the number of
records per label, and a PNG with some of its images."""
_NUM_AT_ONCE = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command_line.run(_parser(), _show, arguments)


def _show(directory: str, num_images: int, num_records: int, to: str | None = None) -> None:
    folder = storage.at(directory)
    index = load_index(folder)
    command_line.print_summary(index, folder)
    print_account(folder)
    from pipelines.show import records  # imports TensorFlow, so after the first table

    counts, first = records.LabelCounts(index), list[bytes]()
    serialized = records.records(folder, index, num_records)
    while chunk := list(itertools.islice(serialized, _NUM_AT_ONCE)):
        counts.add(chunk)
        first += chunk[: max(num_images, 1) - len(first)]
    if not first:
        return
    command_line.print_facts({"first record": "", **records.describe_record(first[0], index)})
    of = "all" if counts.num_records == index.num_records else f"{counts.num_records:,} sampled"
    for feature, of_label in counts.by_feature().items():
        command_line.print_table(
            (feature, f"of {of} records", "percent"),
            (
                (name, f"{count:,}", f"{count / counts.num_records:.1%}")
                for name, count in of_label.items()
            ),
        )
    if to:
        path = Path(to)
    elif isinstance(folder, Path):
        path = folder.resolve().with_name(f"{folder.resolve().name}.png")
    else:
        path = Path(f"{folder.name}.png")
    num_shown = records.contact_sheet(first[:num_images], index, path)
    print(f"{num_shown} images: {path}" if num_shown else "The data contain no images to show.")


def _parser() -> ArgumentParser:
    parser = command_line.parser("show", _DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="folder or URL with an index")
    parser.add_argument(
        "--to",
        "--out",
        metavar="FILE",
        help="PNG to write; default: DIR.png beside a local folder",
    )
    parser.add_argument(
        "--num-images",
        type=NonNegativeInt,
        metavar="N",
        default=36,
        help="images on the contact sheet",
    )
    parser.add_argument(
        "--num-records",
        type=PositiveInt,
        metavar="N",
        default=10_000,
        help="records in which labels are counted, taken from the beginning of each shard",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
