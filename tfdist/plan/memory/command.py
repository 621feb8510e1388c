"""The flags of `python -m tfdist.plan memory`, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.console import sizes, table_files
from tfdist.errors import ConfigurationError
from tfdist.plan import flags
from tfdist.plan.memory import over_flags

DESCRIPTION = "what a training step holds on each device, and the largest batch that fits a card"

#: Those whose replicas each compute what one device does, for a share of the batch.
REPLICAS = [
    "one_device", "mirrored", "multi_worker", "horovod", "central_storage", "towers",
    "parameter_server",
]  # fmt: skip
#: What TensorFlow leaves of a card to CUDA and its libraries, for cards newer than Ampere
#: (`MinSystemMemory` in `tensorflow/core/common_runtime/gpu/gpu_device.cc`).
_RESERVE = "1800MiB"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    flags.add_network(parser)
    parser.add_argument(
        "--batch", type=PositiveInt, default=256, metavar="N", help="global: over all devices"
    )
    parser.add_argument("--devices", type=PositiveInt, default=1, metavar="N", help="replicas")
    parser.add_argument(
        "--servers", type=PositiveInt, default=1, metavar="N", help="parameter servers"
    )
    parser.add_argument(
        "--strategy", nargs="+", choices=["all", *REPLICAS, *over_flags.OVER],
        help="which; left out: those whose replicas are like one device",
    )  # fmt: skip
    over_flags.add_arguments(parser)
    parser.add_argument(
        "--card", metavar="SIZE", help="memory of a device, 24GB or 80GiB, to fill with a batch"
    )
    parser.add_argument(
        "--reserve", default=_RESERVE, metavar="SIZE", help="of it, what is not for tensors"
    )
    parser.add_argument("--table", metavar="FILE", help="where to write the table, .md or .csv")


def run(
    batch: int,
    devices: int,
    servers: int,
    strategy: Sequence[str] | None,
    micro_batches: int,
    order: str,
    shard: Sequence[str],
    card: str | None,
    reserve: str,
    table: str | None,
    **network: Any,
) -> None:
    """Plans and prints a table; the arguments are the flags.

    Raises:
        ConfigurationError: A flag that does not fit.
    """
    table_files.check(table, ".md", ".csv")
    room = None if card is None else sizes.num_bytes(card) - sizes.num_bytes(reserve)
    chosen = flags.network(**network)

    names = list(strategy or [name for name in REPLICAS if devices > 1 or name == "one_device"])
    if "all" in names:
        names = [*REPLICAS, *over_flags.OVER]
    over = over_flags.chosen(names, micro_batches, order, shard)
    if over and devices < 2:
        raise ConfigurationError(
            f"--strategy {next(iter(over.values())).strategy}: lays a model over several devices, "
            "but --devices is 1: give two or more."
        )

    from tfdist.plan.memory import over_devices, report
    from tfdist.plan.memory.devices import Planner
    from tfdist.plan.memory.trace import NOTHING, trace

    if over:
        over_devices.make_devices(devices)
    traced = trace(chosen) if set(names) & set(REPLICAS) else NOTHING
    laid = {
        name: over_devices.OverDevices(chosen, one.strategy, devices, one.options)
        for name, one in over.items()
    }
    planner = Planner(traced, devices, servers, laid)
    rows = [name for name in names if name in REPLICAS] + list(over)
    report.show(planner, rows, batch, room, table)
