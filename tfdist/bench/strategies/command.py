"""The flags of `python -m tfdist.bench strategies`, and what it does."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.bench import outputs
from tfdist.plan import network as networks

DESCRIPTION = "one network under every strategy there is here: speed, and where the time goes"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    networks.add_arguments(parser)
    parser.add_argument(
        "--batch", type=PositiveInt, default=32, metavar="N", help="of each replica"
    )
    parser.add_argument("--replicas", type=PositiveInt, default=2, metavar="N", help="of each")
    parser.add_argument(
        "--steps", type=PositiveInt, default=5, metavar="N", help="that are timed, of each"
    )
    parser.add_argument(
        "--rounds", type=PositiveInt, default=3, metavar="N", help="in which all take turns"
    )
    outputs.add_arguments(parser)


def run(
    batch: int,
    replicas: int,
    steps: int,
    rounds: int,
    json: str | None,
    table: str | None,
    chart: str | None,
    smoke: bool,
    **network: Any,
) -> None:
    """Measures and prints a table; the arguments are the flags.

    Raises:
        ConfigurationError: A flag that does not fit.
        LaunchError: One device does not train already.
    """
    output = outputs.Outputs(json, table, chart)
    chosen = networks.tiny() if smoke else networks.from_flags(**network)
    from tfdist.bench.strategies import measure, report

    if smoke:
        batch, steps, rounds = 4, 2, 1
    results, absent = measure.all_strategies(chosen, batch, replicas, steps, rounds)
    title = f"{chosen.model}, batch {batch} a replica, {replicas} replicas"
    report.conclude("strategies", title, results, absent, output)
