"""The flags of `python -m tfdist.bench checkpoint`, and what it does."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

DESCRIPTION = "what saving costs a training, beside Keras's BackupAndRestore and Orbax"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--weights",
        nargs="+",
        type=PositiveInt,
        default=[1_000_000, 25_000_000],
        metavar="N",
        help="of the network; Adam keeps two more numbers for each",
    )
    parser.add_argument(
        "--every", type=PositiveInt, default=10, metavar="STEPS", help="between two checkpoints"
    )
    parser.add_argument(
        "--saves", type=PositiveInt, default=3, metavar="N", help="checkpoints of a training"
    )
    parser.add_argument(
        "--rounds", type=PositiveInt, default=5, metavar="N", help="trainings of each contender"
    )
    parser.add_argument("--folder", metavar="DIR", help="to save in; left out: a temporary one")
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    parser.add_argument("--smoke", action="store_true", help="small and short: does it work?")


def run(
    weights: Sequence[int],
    every: int,
    saves: int,
    rounds: int,
    folder: str | None,
    json: str | None,
    smoke: bool,
) -> None:
    """Measures and prints a table; the arguments are the flags."""
    from tfdist.bench import document
    from tfdist.bench.checkpoint import measure, report
    from tfdist.bench.machine import OthersLoad
    from tfdist.console import tables

    sizes = list(weights)
    if smoke:
        sizes, every, saves, rounds = [10_000], 2, 2, 2
    load = OthersLoad()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        results = [measure.size(n, every, saves, rounds, place) for n in sizes]
    report.show(results)
    tables.text(document.conclude("checkpoint", results, load.fraction(), json))
