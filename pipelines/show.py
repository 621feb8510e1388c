"""`python -m pipelines.show DIR`: features, counts and a contact sheet of a folder of shards."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt

from pipelines import command_line, reports
from pipelines.index import Index, load_index

_DESCRIPTION = """Shows what a folder holds: its features, its first record, how often each label
comes, and a PNG of its images."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command_line.run(_parser(), _show, arguments)


def _show(directory: str, to: str | None, num_images: int, num_records: int) -> None:
    folder = Path(directory)
    index = load_index(folder)
    reports.summary(index, folder)
    from pipelines import showing  # imports TensorFlow, so after the first table

    sample = showing.sample(folder, index, num_records)
    if not sample:
        return
    reports.facts({"first record": "", **showing.in_words(sample[0], index)})
    _show_labels(sample, index)
    path = Path(to or f"{folder.resolve().name}.png")
    num_shown = showing.contact_sheet(sample[:num_images], index, path)
    if num_shown:
        print(f"{num_shown} images: {path}")
    else:
        print("No feature holds images that can be shown.")


def _show_labels(sample: Sequence[bytes], index: Index) -> None:
    from pipelines import showing

    share = "all" if len(sample) == index.num_records else f"{len(sample):,} sampled"
    for feature, counts in showing.label_counts(sample, index).items():
        reports.table(
            (feature, f"of {share} records", "share"),
            ((name, f"{count:,}", f"{count / len(sample):.1%}") for name, count in counts.items()),
        )


def _parser() -> ArgumentParser:
    parser = command_line.parser("show", _DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="folder with an index")
    parser.add_argument("--to", metavar="FILE", help="the PNG; by default DIR's name, here")
    parser.add_argument(
        "--num-images", type=NonNegativeInt, default=36, help="on the contact sheet"
    )
    parser.add_argument(
        "--num-records",
        type=PositiveInt,
        default=10_000,
        help="to count labels in, the first of each shard",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
