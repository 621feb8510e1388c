"""The flags of `python -m tfdist.bench unet`, and what it does."""

from __future__ import annotations

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.bench import outputs
from tfdist.plan.network import Network

DESCRIPTION = "a U-Net on one device, and on two by data, by layers and by channels"

_STRATEGIES = ("one_device", "mirrored", "pipeline", "tensor_parallel")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--size", type=PositiveInt, default=64, metavar="N", help="sides of the images, in pixels"
    )
    parser.add_argument(
        "--filters", type=PositiveInt, default=16, metavar="N", help="at full size; the paper: 64"
    )
    parser.add_argument("--depth", type=PositiveInt, default=4, metavar="N", help="times halved")
    parser.add_argument("--batch", type=PositiveInt, default=8, metavar="N", help="of each device")
    parser.add_argument(
        "--steps", type=PositiveInt, default=5, metavar="N", help="that are timed, of each"
    )
    parser.add_argument(
        "--rounds", type=PositiveInt, default=3, metavar="N", help="in which all take turns"
    )
    outputs.add_arguments(parser)


def run(
    size: int,
    filters: int,
    depth: int,
    batch: int,
    steps: int,
    rounds: int,
    json: str | None,
    table: str | None,
    chart: str | None,
    smoke: bool,
) -> None:
    """Measures and prints a table; the arguments are the flags.

    Raises:
        ConfigurationError: A flag that does not fit.
        LaunchError: One device does not train already.
    """
    output = outputs.Outputs(json, table, chart)
    from tfdist.bench.strategies import measure, report

    if smoke:
        size, filters, depth, batch, steps, rounds = 16, 2, 2, 4, 2, 1
    network = Network("unet", (size, size, 3), 2, settings={"filters": filters, "depth": depth})
    results, absent = measure.all_strategies(network, batch, 2, steps, rounds, only=_STRATEGIES)
    title = f"U-Net of {size}x{size} pixels, batch {batch} a replica, 2 replicas"
    report.conclude("unet", title, results, absent, output)
