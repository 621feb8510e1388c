"""`python -m pipelines.pack SRC DEST`: packs a data set into TFRecord shards with an index.

Each shard is one task: its examples follow from the seed alone, so that any process can write it,
and a start after an interrupt writes only what is missing. This module imports TensorFlow where it
packs, for `--help` to answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt

from pipelines.console import command_line, tables
from pipelines.sources import SOURCES

if TYPE_CHECKING:
    from pipelines.format.compression import Compression

_DESCRIPTION = """Packs a data set into TFRecord shards, with an index beside them. Started again
with the same options after an interrupt, it goes on where it stopped."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command_line.run(_parser(), _pack, arguments)


def _pack(
    src: str,
    dest: str,
    kind: str,
    seed: int,
    compression: Compression | Literal["none"],
    num_shards: int | None = None,
    num_workers: int | None = None,
    shuffle: bool = True,
    **of_source: object,
) -> None:
    from pipelines.pack.from_source import packed

    try:
        index = packed(
            src,
            dest,
            kind=kind,
            num_shards=num_shards,
            seed=seed if shuffle else None,
            compression="" if compression == "none" else compression,
            num_workers=num_workers,
            **of_source,
        )
    except KeyboardInterrupt:
        print("stopped: started again with the same options, it goes on from here", file=sys.stderr)
        raise
    tables.summary(index, Path(dest))


def _parser() -> ArgumentParser:
    parser = command_line.parser("pack", _DESCRIPTION)
    parser.add_argument("src", metavar="SRC", help="folder or file to pack, or tfds:NAME")
    parser.add_argument("dest", metavar="DEST", help="folder to make")
    parser.add_argument(
        "--from",
        dest="kind",
        choices=["auto", *SOURCES],
        default="auto",
        help="what SRC is; by default it is found out",
    )
    parser.add_argument(
        "--num-shards",
        type=PositiveInt,
        metavar="N",
        help="files to write; by default as many as make them 100 MB each",
    )
    parser.add_argument(
        "--seed", type=NonNegativeInt, metavar="N", default=0, help="of the shuffling"
    )
    parser.add_argument(
        "--no-shuffle",
        dest="shuffle",
        action="store_false",
        help="deal the examples out in the order of the source",
    )
    parser.add_argument(
        "--compression",
        choices=["none", "GZIP", "ZLIB"],
        default="none",
        help="of the shards; images are compressed already",
    )
    parser.add_argument(
        "--num-workers", type=PositiveInt, metavar="N", help="processes; by default one a core"
    )
    _add_source_flags(parser)
    return parser


def _add_source_flags(parser: ArgumentParser) -> None:
    """The flags that only some sources take; `sources.source.Options` has their names."""
    group = parser.add_argument_group("of some sources")
    group.add_argument("--split", help="of tfds, cifar, celeba, imagenet: train, test, ...")
    group.add_argument("--data-dir", help="of tfds: where its data sets are; none is downloaded")
    group.add_argument("--label", help="of tables: the column of class names")
    group.add_argument(
        "--fill",
        action="append",
        metavar="COLUMN=VALUE",
        help="of tables: what stands where a column has no value; once for each column",
    )
    group.add_argument(
        "--drop-gaps",
        action="store_true",
        help="of tables: leave rows out that have no value in some column",
    )
    group.add_argument(
        "--whole-files",
        action="store_true",
        help="of text: one example a file; by default one a line",
    )
    group.add_argument(
        "--image-size",
        metavar="PIXELS",
        help="resize images: 256 for the shorter side, 224x224 for exactly that, middle cropped",
    )
    group.add_argument(
        "--image-format", choices=["jpeg", "png"], help="of the stored images; by default their own"
    )
    group.add_argument(
        "--quality",
        type=PositiveInt,
        metavar="N",
        help="encode JPEGs again, 1 to 100; 95 if resized",
    )
    group.add_argument(
        "--channels", type=PositiveInt, metavar="N", help="that images are decoded to: 1, 3 or 4"
    )


if __name__ == "__main__":
    sys.exit(main())
