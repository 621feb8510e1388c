"""`tfdist plan memory`: predicts the memory of a training step on each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.console import tables, units
from tfdist.errors import ConfigurationError
from tfdist.strategies import STRATEGIES
from tfdist.tools.plan import network as networks

if TYPE_CHECKING:
    from tfdist.memory import Planner
    from tfdist.tools.plan.network import Workload

DESCRIPTION = (
    "predicts the memory of a training step on each device, and the largest batch that fits"
)

#: Data-parallel strategies, whose replicas have the whole model.
REPLICATED = [
    "one_device", "mirrored", "multi_worker", "horovod", "central_storage", "towers",
    "parameter_server",
]  # fmt: skip
#: Strategies that split one model over the devices.
SPLIT = ["pipeline", "tensor_parallel", "sharded"]
SHARDS = STRATEGIES["sharded"].options["shard"].choices
#: Memory that TensorFlow reserves for CUDA and its libraries on GPUs newer than Ampere
#: (`MinSystemMemory` in `tensorflow/core/common_runtime/gpu/gpu_device.cc`).
_RESERVE = "1800MiB"
_NOTE = (
    "At the peak of a step. 'activations' includes everything except weights, gradients and "
    "optimizer state: tensors of both passes and of the update, rounded up by the allocator. "
    "Workspaces of GPU kernels are not included."
)


class Layout(NamedTuple):
    """A strategy that splits a model, with its options."""

    strategy: str
    options: dict[str, Any]


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    networks.add_plan_arguments(parser, networks.OF_GLOBAL_BATCH)
    parser.add_argument(
        "--devices", type=PositiveInt, default=1, metavar="N", help="number of devices"
    )
    parser.add_argument(
        "--servers", type=PositiveInt, default=1, metavar="N", help="number of parameter servers"
    )
    parser.add_argument(
        "--strategy", nargs="+", choices=["all", *REPLICATED, *SPLIT],
        help="strategies to predict (default: all data-parallel strategies)",
    )  # fmt: skip
    parser.add_argument(
        "--micro-batches", type=PositiveInt, default=4, metavar="N",
        help="number of micro-batches of pipeline",
    )  # fmt: skip
    parser.add_argument(
        "--order", choices=STRATEGIES["pipeline"].options["order"].choices, default="gpipe",
        help="schedule of pipeline; interleaved: two stages per device",
    )  # fmt: skip
    parser.add_argument(
        "--split-activations", nargs="+", default=["none"],
        choices=STRATEGIES["tensor_parallel"].options["split_activations"].choices,
        help="activations between split layers of tensor_parallel; rows: in parts on all devices",
    )  # fmt: skip
    parser.add_argument(
        "--shard", nargs="+", choices=SHARDS, default=list(SHARDS),
        help="what to shard with strategy sharded",
    )  # fmt: skip
    parser.add_argument(
        "--remat", default="none", metavar="LAYERS", help="activation checkpointing, as in training"
    )
    parser.add_argument(
        "--offload-activations", action="store_true", help="activations in host memory"
    )
    parser.add_argument(
        "--card", metavar="SIZE",
        help="memory of a device, such as 24GB or 80GiB: adds the largest batch that fits",
    )  # fmt: skip
    parser.add_argument(
        "--reserve", default=_RESERVE, metavar="SIZE",
        help="memory of --card that is not available for tensors",
    )  # fmt: skip


def run(
    batch_size: int | None,
    devices: int,
    servers: int,
    strategy: Sequence[str] | None,
    micro_batches: int,
    order: str,
    split_activations: Sequence[str],
    shard: Sequence[str],
    remat: str,
    offload_activations: bool,
    card: str | None,
    reserve: str,
    table: str | None,
    **network: Any,
) -> None:
    """Prints the predictions as a table. The arguments are the values of the flags.

    Raises:
        ConfigurationError: A flag has an invalid value.
    """
    tables.check_path(table, ".md", ".csv")
    capacity = None  # bytes of a device that are available for tensors
    if card is not None:
        reserved = networks.parsed("--reserve", units.num_bytes, reserve)
        capacity = networks.parsed("--card", units.num_bytes, card) - reserved
        if capacity <= 0:
            raise ConfigurationError(
                f"--card {card}: not more than --reserve {reserve}, so nothing is left for "
                "tensors. Use a larger --card, with a unit as in 24GB, or a smaller --reserve."
            )
    chosen = networks.from_flags(**network)
    names = list(strategy or [s for s in REPLICATED if devices > 1 or s == "one_device"])
    if "all" in names:
        names = [*REPLICATED, *SPLIT]
    # Strategies that split the model, with their options, by the name of their row.
    layouts: dict[str, Layout] = {}
    for name in names:
        if name == "sharded":
            layouts |= {f"sharded {what}": Layout(name, {"shard": what}) for what in shard}
        elif name == "pipeline":
            layouts[name] = Layout(name, {"micro_batches": micro_batches, "order": order})
        elif name == "tensor_parallel":
            for how in split_activations:
                row = name if how == "none" else f"{name}, activations by {how}"
                layouts[row] = Layout(name, {"split_activations": how})
    if layouts and devices < 2:
        raise ConfigurationError(
            f"--strategy {next(iter(layouts.values())).strategy} splits a model over several "
            "devices, but --devices is 1. Use --devices 2 or more."
        )
    of_step = {"remat": remat, "offload_activations": offload_activations}
    planners = _planners(chosen, names, layouts, devices, servers, of_step)
    _show(planners, networks.global_batch(batch_size, chosen), capacity, table)


def _planners(
    network: Workload,
    names: Sequence[str],
    layouts: Mapping[str, Layout],
    num_devices: int,
    num_servers: int,
    of_step: Mapping[str, Any],
) -> dict[str, Planner]:
    """Returns the planner of each table row. Traces the network, which initializes TensorFlow."""
    from tfdist.tools.plan import devices

    planners: dict[str, Planner] = {}
    if layouts:
        devices.make_devices(num_devices)  # before TensorFlow is initialized
    if replicated := [name for name in names if name in REPLICATED]:
        step = devices.ReplicatedStep(network, **of_step)
        for name in replicated:
            planners[name] = devices.ReplicaPlanner(step, name, num_devices, num_servers)
    for name, one in layouts.items():
        planners[name] = devices.split_planner(
            network, one.strategy, num_devices, one.options, **of_step
        )
    return planners


def _show(
    planners: Mapping[str, Planner], batch: int, capacity: int | None, path: str | None
) -> None:
    """Prints a row for each strategy and kind of device.

    Args:
        planners: By the name of the strategy.
        batch: Global batch size.
        capacity: Bytes of a device that are available for tensors; None: the largest batch is not
            shown.
        path: File to write the table to, or None.
    """
    header = ["strategy", "device", "weights", "gradients", "optimizer", "activations", "total"]
    if capacity is not None:
        header.append("largest batch")
    rows = []
    for name, planner in planners.items():
        largest = "" if capacity is None else str(planner.largest_batch(capacity) or "none")
        for one in planner.devices(batch):
            parts = (one.weights, one.gradients, one.optimizer, one.activations, one.total)
            rows.append([name, one.role, *map(units.format_bytes, parts)])
            if capacity is not None:
                rows[-1].append(largest)
                largest = ""
    tables.numbers(header, rows, title=f"global batch of {batch}", num_names=2)
    tables.text(_NOTE)
    if path:
        tables.write_file(Path(path), header, rows)
