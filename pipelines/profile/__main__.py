"""`python -m pipelines.profile DIR`: finds what limits reading a folder, and advises."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveFloat, PositiveInt
from pydantic import ByteSize, TypeAdapter, ValidationError

from pipelines.console import command_line
from pipelines.errors import DataError

_DESCRIPTION = """Measures each stage of reading a folder on this machine: reading, parsing,
decoding images, cropping and scaling them, and batching."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command_line.run(_parser(), _profile, arguments)


def _profile(
    directory: str,
    batch_size: int,
    image_size: int,
    seconds: float,
    chart: str,
    read_ahead: str,
    cache_dir: str | None = None,
) -> None:
    from pipelines.profile.stages import ADVICE, SHORTEST_EPOCH, draw_chart, is_too_small, measure
    from pipelines.reading.tuning import Tuning

    size = (image_size, image_size)
    try:
        num_bytes = TypeAdapter(ByteSize).validate_python(read_ahead)
    except ValidationError:
        raise DataError(
            f"--read-ahead: expected a size such as 512MB, got {read_ahead!r}"
        ) from None
    tuning = Tuning(read_ahead_bytes=num_bytes, cache_dir=cache_dir)
    stages = measure(directory, batch_size=batch_size, size=size, seconds=seconds, tuning=tuning)
    total = sum(stage.microseconds for stage in stages)
    command_line.print_table(
        ("stage", "us/record", "percent", "records/s up to this stage"),
        [
            (
                stage.name,
                f"{stage.microseconds:.1f}",
                f"{stage.microseconds / total:.0%}",
                f"{stage.records_per_s:,.0f}",
            )
            for stage in stages
        ],
    )
    limit = max(stages, key=lambda stage: stage.microseconds)
    title = f"{directory}: reading in batches of {batch_size}"
    if is_too_small(directory, stages):
        title += "; too small to measure"
        print(f"Too small to measure: an epoch takes less than {SHORTEST_EPOCH:g} s.")
    else:
        print(f"The slowest stage is '{limit.name}': {ADVICE[limit.name]}.")
    draw_chart(stages, title, Path(chart))
    print(f"chart: {chart}")


def _parser() -> ArgumentParser:
    parser = command_line.parser("profile", _DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="folder or URL with an index")
    parser.add_argument("--batch-size", type=PositiveInt, default=64, metavar="N", help="records")
    parser.add_argument(
        "--image-size", type=PositiveInt, default=224, metavar="N", help="pixels per side"
    )
    parser.add_argument(
        "--seconds", type=PositiveFloat, default=3.0, metavar="X", help="time per stage"
    )
    parser.add_argument(
        "--read-ahead",
        default="512MB",
        metavar="SIZE",
        help="memory for data read ahead from a URL",
    )
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="local cache of data from a URL; default: none"
    )
    parser.add_argument(
        "--chart", default="profile.png", metavar="PNG", help="where to draw the chart"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
