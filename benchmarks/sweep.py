"""`python -m benchmarks sweep`: throughput and memory by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from tfdist.errors import LaunchError
from tfdist.tools.bench import harness
from tfdist.tools.plan import network as networks

DESCRIPTION = "throughput and memory by batch size, on the CPU and on a GPU if there is one"

#: A device counts as saturated from this part of its highest throughput.
SATURATED = 0.95
_BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
_HEADER = ("device", "batch", "ms/step", "examples/s", "peak MB", "")


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags."""
    networks.add_arguments(parser)
    parser.add_argument(
        "--batches", nargs="+", type=PositiveInt, default=_BATCHES, metavar="N", help="batch sizes"
    )
    parser.add_argument(
        "--memory", type=PositiveInt, metavar="MB",
        help="memory limit of the CPU's tensors (default: none)",
    )  # fmt: skip
    harness.add_arguments(parser, steps=5, table=True, chart=True)


def run(
    batches: Sequence[int],
    memory: int | None,
    steps: int,
    output: harness.Output,
    smoke: bool,
    **network: Any,
) -> None:
    """Measures and prints a table; the arguments are the values of the flags.

    Raises:
        ConfigurationError: A flag has a value that does not fit.
        LaunchError: The smallest batch does not train.
    """
    chosen = networks.tiny() if smoke else networks.from_flags(**network)
    if smoke:
        batches, steps = [1, 8], 2
    results = measure(chosen, sorted(batches), steps, memory)
    output.show(_HEADER, [_cells(row) for row in results], f"{chosen.model} by batch size")
    output.conclude(results, paint=_paint, size=(10, 4.5))


def measure(
    network: networks.Network, batches: Sequence[int], num_steps: int, memory: int | None
) -> list[dict[str, Any]]:
    """Returns a row for each kind of device and each batch size, in this order.

    Args:
        network: What is trained.
        batches: Batch sizes, rising.
        num_steps: Steps of a measurement.
        memory: Memory limit of the CPU's tensors in MB, or None.

    Raises:
        LaunchError: The smallest batch does not train.
    """
    import tensorflow as tf

    kinds = {"CPU": {"CUDA_VISIBLE_DEVICES": "-1"}}
    if memory:
        kinds["CPU"]["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(memory)
    if tf.config.list_physical_devices("GPU"):
        kinds["GPU"] = {}
    found = [_on_device(network, batches, num_steps, environ) for environ in kinds.values()]
    return [row for rows in found for row in rows]


def _on_device(
    network: networks.Network, batches: Sequence[int], num_steps: int, environ: dict[str, str]
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
                # Some kernels of the CPU crash at the limit; their last line says why.
                out_of_memory = "out of memory" in str(error)
                why = "out of memory" if out_of_memory else str(error).strip().splitlines()[-1]
                rows.append({"device": rows[0]["device"], "batch": batch, "error": why})
                break  # larger ones do not fit either
            rows.append({"batch": batch} | sample.as_row(batch))
    best = max(row.get("examples_per_s", 0) for row in rows)
    enough = [row for row in rows if row.get("examples_per_s", 0) >= SATURATED * best]
    enough[0]["saturates"] = True
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["device"], str(row["batch"]), "", "", "", row["error"]]
    note = f"{SATURATED:.0%} of the highest" if row.get("saturates") else ""
    numbers = (f"{row['ms']:.1f}", f"{row['examples_per_s']:.0f}", f"{row['peak_mb']:.0f}")
    return [row["device"], str(row["batch"]), *numbers, note]


def _paint(figure: Any, results: Sequence[dict[str, Any]]) -> None:
    """Draws throughput and memory by batch size."""
    speeds, memory = figure.subplots(1, 2)
    for device in dict.fromkeys(row["device"] for row in results):
        rows = [row for row in results if row["device"] == device and "ms" in row]
        batches = [row["batch"] for row in rows]
        speeds.plot(batches, [row["examples_per_s"] for row in rows], marker="o", label=device)
        memory.plot(batches, [row["peak_mb"] for row in rows], marker="o", label=device)
        for row in rows:
            if row.get("saturates"):
                speeds.axvline(row["batch"], color="gray", linestyle="--")
    speeds.set(xlabel="batch size", ylabel="examples per second", ylim=(0, None))
    memory.set(xlabel="batch size", ylabel="peak memory, MB", ylim=(0, None))
    for axes in (speeds, memory):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
