"""`python -m benchmarks unet`: a U-Net on one device, and on two by data, layers and channels."""

from __future__ import annotations

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from benchmarks import strategies
from tfdist.tools.bench import harness
from tfdist.tools.plan.network import Network

DESCRIPTION = "a U-Net on one device, and on two by data, by layers and by channels"

_STRATEGIES = ("one_device", "mirrored", "pipeline", "tensor_parallel")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--size", type=PositiveInt, default=64, metavar="N", help="side of the images in pixels"
    )
    parser.add_argument(
        "--filters", type=PositiveInt, default=16, metavar="N",
        help="filters at full size; 64 in the paper",
    )  # fmt: skip
    parser.add_argument(
        "--depth", type=PositiveInt, default=4, metavar="N", help="number of halvings"
    )
    parser.add_argument(
        "--batch", type=PositiveInt, default=8, metavar="N", help="per-replica batch size"
    )
    harness.add_arguments(parser, steps=5, rounds=3, table=True, chart=True)


def run(
    size: int,
    filters: int,
    depth: int,
    batch: int,
    steps: int,
    rounds: int,
    output: harness.Output,
    smoke: bool,
) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    Raises:
        ConfigurationError: A flag has a value that does not fit.
        LaunchError: The training on one device fails.
    """
    if smoke:
        size, filters, depth, batch, steps, rounds = 16, 2, 2, 4, 2, 1
    network = Network("unet", (size, size, 3), 2, settings={"filters": filters, "depth": depth})
    results, absent = strategies.measure(network, batch, 2, steps, rounds, only=_STRATEGIES)
    title = f"U-Net, {size}x{size} pixels, per-replica batch {batch}"
    strategies.conclude(title, results, absent, output)
