"""`python -m pipelines.pack SRC DEST`: packs a data set into TFRecord shards with an index.

This module imports TensorFlow only where it packs, so that `--help` answers at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt

from pipelines import storage
from pipelines.console import command_line
from pipelines.errors import DataError
from pipelines.sources import SOURCES
from pipelines.sources.account import print_account
from pipelines.sources.source import Options
from pipelines.sources.types import described

if TYPE_CHECKING:
    from pipelines.format.record_file import Compression

_DESCRIPTION = """Packs a data set into TFRecord shards with an index. To continue after an
interrupt, run it again with the same options."""


#: Flags with a value that a job of one part does not get.
_FLAGS_OF_PARTS = ("--part", "--via", "--print-slurm", "--print-k8s", "--image")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return command_line.run(_parser(), functools.partial(_pack, words), words)


def _pack(
    arguments: Sequence[str],
    src: str,
    dest: str,
    kind: str,
    seed: int,
    compression: Compression | Literal["none"],
    num_shards: int | None = None,
    num_workers: int | None = None,
    shuffle: bool = True,
    via: str = "processes",
    part: str | None = None,
    finish: bool = False,
    strict: bool = False,
    print_slurm: int | None = None,
    print_k8s: int | None = None,
    image: str | None = None,
    **source_options: object,
) -> None:
    from pipelines.pack import parts
    from pipelines.pack.packing import make_plan, pack
    from pipelines.pack.parts import Part

    rest = parts.without(arguments, _FLAGS_OF_PARTS)
    if print_slurm:
        print(parts.slurm_script(rest, print_slurm), end="")
        return
    if print_k8s:
        print(parts.kubernetes_job(rest, print_k8s, image), end="")
        return
    if via == "ray" and num_workers:
        raise DataError("--num-workers: does not apply to --via ray, which uses all free cores")
    chosen = Part.parse(part) if part else None
    if chosen and finish:
        raise DataError("--finish: publishes the shards of all parts; omit --part")
    try:
        plan = make_plan(
            src,
            kind,
            num_shards,
            seed if shuffle else None,
            "" if compression == "none" else compression,
            source_options,
        )
        if plan.source.readings:
            print(described(plan.source.readings))
        index = pack(
            plan,
            storage.at(dest),
            num_workers,
            part=chosen,
            finish=finish,
            by_ray=via == "ray",
            strict=strict,
        )
    except KeyboardInterrupt:
        print("Stopped. Run the same command again to continue.", file=sys.stderr)
        raise
    if index is None:
        print(f"Part {part} is complete. The data set appears when all parts are complete.")
    else:
        command_line.print_summary(index, storage.at(dest))
        print_account(storage.at(dest))


def _parser() -> ArgumentParser:
    parser = command_line.parser("pack", _DESCRIPTION)
    parser.add_argument("src", metavar="SRC", help="folder or file to pack, or tfds:NAME")
    parser.add_argument("dest", metavar="DEST", help="folder or URL to create")
    parser.add_argument(
        "--from",
        dest="kind",
        choices=["auto", *SOURCES],
        default="auto",
        help="format of SRC; detected by default",
    )
    parser.add_argument(
        "--num-shards",
        type=PositiveInt,
        metavar="N",
        help="files to write; by default of about 100 MB each",
    )
    parser.add_argument(
        "--seed", type=NonNegativeInt, metavar="N", default=0, help="seed of the shuffling"
    )
    parser.add_argument(
        "--no-shuffle",
        dest="shuffle",
        action="store_false",
        help="keep the order of the source; shard I gets every N-th example",
    )
    parser.add_argument(
        "--compression",
        choices=["none", "GZIP", "ZLIB"],
        default="none",
        help="compression of the shards; images are compressed already",
    )
    parser.add_argument(
        "--num-workers", type=PositiveInt, metavar="N", help="processes; default: by the work"
    )
    parser.add_argument(
        "--strict", action="store_true", help="fail if anything is left out or guessed"
    )
    group = parser.add_argument_group("several machines")
    group.add_argument(
        "--part",
        metavar="I/N",
        help="write only the shards of part I of N; 'auto' or 'auto/N' takes I from Slurm's array "
        "job, Kubernetes' indexed job, tfdist.launch or mpirun",
    )
    group.add_argument(
        "--finish",
        action="store_true",
        help="publish the shards of all parts, or report which are missing",
    )
    group.add_argument(
        "--via",
        choices=["processes", "ray"],
        default="processes",
        help="ray: write on all machines of a Ray cluster, which need to reach SRC and DEST",
    )
    group.add_argument(
        "--print-slurm", type=PositiveInt, metavar="N", help="print an array job of N parts"
    )
    group.add_argument(
        "--print-k8s", type=PositiveInt, metavar="N", help="print an indexed job of N parts"
    )
    group.add_argument("--image", help="container image of --print-k8s")
    group = parser.add_argument_group("options of some sources")
    for name, field in Options.model_fields.items():
        arguments = cast(dict[str, Any], field.json_schema_extra or {})
        group.add_argument(f"--{name.replace('_', '-')}", help=field.description, **arguments)
    return parser


if __name__ == "__main__":
    sys.exit(main())
