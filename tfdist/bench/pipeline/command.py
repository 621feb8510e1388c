"""The flags of `python -m tfdist.bench pipeline`, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

DESCRIPTION = "a pipeline's speed-up over one device, against what its bubble leaves"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--stages", nargs="+", type=Literal[2, 4], default=[2, 4], metavar="N", help="2, 4 or both"
    )
    parser.add_argument(
        "--micro-batches", nargs="+", type=PositiveInt, default=[1, 2, 4, 8, 16, 32], metavar="M",
        help="into which a batch is cut",
    )  # fmt: skip
    parser.add_argument(
        "--orders", nargs="+", type=Literal["gpipe", "1f1b"], default=["gpipe", "1f1b"],
        metavar="ORDER", help="gpipe, 1f1b or both",
    )  # fmt: skip
    parser.add_argument(
        "--step-ms", type=PositiveInt, default=480, help="for which one device waits in a step"
    )
    parser.add_argument("--steps", type=PositiveInt, default=5, help="of a measurement")
    parser.add_argument("--rounds", type=PositiveInt, default=3, help="measurements of each")
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    parser.add_argument("--smoke", action="store_true", help="small and short: does it work?")


def run(
    stages: Sequence[int],
    micro_batches: Sequence[int],
    orders: Sequence[str],
    step_ms: int,
    steps: int,
    rounds: int,
    json: str | None,
    smoke: bool,
) -> None:
    """Measures and prints a table; the arguments are the flags."""
    from tfdist.bench import document
    from tfdist.bench.machine import OthersLoad
    from tfdist.bench.pipeline import measure, report
    from tfdist.console import tables

    if smoke:
        stages, micro_batches, orders, step_ms, steps, rounds = [2], [2], ["1f1b"], 24, 2, 1
    load = OthersLoad()
    results = measure.all_of(stages, micro_batches, orders, step_ms, steps, rounds)
    report.show(results, step_ms)
    tables.text(document.conclude("pipeline", results, load.fraction(), json))
