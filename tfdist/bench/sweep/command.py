"""The flags of `python -m tfdist.bench sweep`, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.bench import outputs
from tfdist.plan import network as networks

DESCRIPTION = "throughput and memory over the batch, on the CPU and on a GPU where there is one"
_BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    networks.add_arguments(parser)
    parser.add_argument(
        "--batches", nargs="+", type=PositiveInt, default=_BATCHES, metavar="N", help="rising"
    )
    parser.add_argument(
        "--memory", type=PositiveInt, metavar="MB",
        help="limit of the CPU's tensors, to see where it ends; left out: none",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=PositiveInt, default=5, metavar="N", help="that are timed, of each batch"
    )
    outputs.add_arguments(parser)


def run(
    batches: Sequence[int],
    memory: int | None,
    steps: int,
    json: str | None,
    table: str | None,
    chart: str | None,
    smoke: bool,
    **network: Any,
) -> None:
    """Measures and prints a table; the arguments are the flags.

    Raises:
        ConfigurationError: A flag that does not fit.
        LaunchError: Not even the smallest batch trains.
    """
    output = outputs.Outputs(json, table, chart)
    chosen = networks.tiny() if smoke else networks.from_flags(**network)
    from tfdist.bench.sweep import measure, report

    if smoke:
        batches, steps = [1, 8], 2
    results = measure.sweep(chosen, sorted(batches), steps, memory)
    report.show(results, chosen.model, output)
    output.conclude("sweep", results, report.paint, width=10)
