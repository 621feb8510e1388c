"""The flags of `python -m tfdist.plan memory`, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.console import sizes, table_files
from tfdist.plan import flags

DESCRIPTION = "what a training step holds on each device, and the largest batch that fits a card"

#: Those that give each device a share of the batch.
STRATEGIES = [
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
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, help="which; left out: all")
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

    from tfdist.plan.memory import report
    from tfdist.plan.memory.devices import Planner
    from tfdist.plan.memory.trace import trace

    traced = trace(chosen)
    planner = Planner(traced, devices, servers)
    names = strategy or [name for name in STRATEGIES if devices > 1 or name == "one_device"]
    report.show(planner, names, batch, room, table)
