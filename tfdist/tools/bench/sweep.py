"""`tfdist bench sweep`: throughput, memory and utilization by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.errors import LaunchError
from tfdist.tools.bench import harness
from tfdist.tools.plan import network as networks

DESCRIPTION = "throughput, memory and utilization by batch size, on the CPU and on a GPU"

#: A device counts as saturated from this part of its highest throughput.
SATURATED = 0.95
#: By default: a network of three convolutions on the shape of CIFAR-100.
CIFAR100 = networks.Network("cnn", (32, 32, 3), 100)
_BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
_HEADER = ("device", "batch", "ms", "examples/s", "peak MB", "utilization", "")
_NOTE = (
    "'utilization': of a GPU, the part of the last second with a kernel, as NVML counts it; of a "
    "CPU, the part of all cores that the process used."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    networks.add_arguments(parser)
    parser.add_argument(
        "--batches", nargs="+", type=PositiveInt, default=_BATCHES, metavar="N", help="batch sizes"
    )
    harness.add_arguments(parser, steps=5, table=True, chart=True)


def run(
    batches: Sequence[int], steps: int, output: harness.Output, smoke: bool, **network: Any
) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    Raises:
        ConfigurationError: A flag has an invalid value.
        LaunchError: The smallest batch does not train.
    """
    is_named = network["program"] or network["model"]
    chosen = networks.from_flags(**network) if is_named else CIFAR100
    if smoke:
        chosen, batches, steps = networks.tiny(), [1, 8], 2
    results = measure(chosen, sorted(batches), steps)
    output.show(_HEADER, [_cells(row) for row in results], f"{chosen.model} by batch size")
    output.conclude(results, _NOTE, _paint, (12, 4))


def measure(
    network: networks.Workload, batches: Sequence[int], num_steps: int
) -> list[dict[str, Any]]:
    """Returns a row for each kind of device and each batch size, in this order.

    Args:
        network: What is trained.
        batches: Batch sizes, rising.
        num_steps: Steps of a measurement.

    Raises:
        LaunchError: The smallest batch does not train.
    """
    kinds: list[dict[str, str]] = [{"CUDA_VISIBLE_DEVICES": "-1"}]
    if harness.machine_facts()["gpus"]:
        kinds.append({})
    return [row for kind in kinds for row in _on_device(network, batches, num_steps, kind)]


def _on_device(
    network: networks.Workload, batches: Sequence[int], num_steps: int, environ: dict[str, str]
) -> list[dict[str, Any]]:
    """Measures all batch sizes in a process with these environment variables."""
    from tfdist.tools.plan import step_profile

    rows: list[dict[str, Any]] = []
    with step_profile.pool(environ=environ) as pool:
        for batch in batches:
            try:
                (sample,) = pool.ask(network, batch, "one_device", 1, num_steps)
            except LaunchError as error:
                if not rows:
                    raise
                why = str(error).strip().splitlines()[-1]
                rows.append({"device": rows[0]["device"], "batch": batch, "error": why})
                break  # larger ones do not fit either
            rows.append({"device": sample.device, "batch": batch, "ms": 1e3 * sample.seconds,
                         "examples_per_s": batch / sample.seconds,
                         "peak_mb": sample.peak_bytes / 1e6, "utilization": sample.utilization,
                         })  # fmt: skip
    best = max(row.get("examples_per_s", 0) for row in rows)
    next(row for row in rows if row["examples_per_s"] >= SATURATED * best)["saturates"] = True
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["device"], str(row["batch"]), "", "", "", "", row["error"]]
    numbers = (f"{row['ms']:.1f}", f"{row['examples_per_s']:.0f}", f"{row['peak_mb']:.0f}")
    note = f"{SATURATED:.0%} of the highest" if row.get("saturates") else ""
    return [row["device"], str(row["batch"]), *numbers, f"{row['utilization']:.0%}", note]


def _paint(figure: Any, results: Sequence[dict[str, Any]]) -> None:
    """Draws throughput, memory and utilization by batch size."""
    columns = {
        "examples_per_s": "examples per second", "peak_mb": "peak memory, MB",
        "utilization": "utilization",
    }  # fmt: skip
    for axes, (name, label) in zip(figure.subplots(1, 3), columns.items(), strict=True):
        for device in dict.fromkeys(row["device"] for row in results):
            rows = [row for row in results if row["device"] == device and name in row]
            batches = [row["batch"] for row in rows]
            axes.plot(batches, [row[name] for row in rows], marker="o", label=device)
        axes.set(xlabel="batch size", ylabel=label, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
