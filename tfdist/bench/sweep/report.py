"""Table and chart of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.bench.outputs import Outputs
from tfdist.bench.sweep.measure import SATURATED

_HEADER = ("device", "batch", "ms a step", "examples/s", "peak MB", "")


def show(results: Sequence[dict[str, Any]], model: str, output: Outputs) -> None:
    """Prints the table, and writes it where wanted."""
    output.show(_HEADER, [_cells(row) for row in results], f"{model} over the batch")


def paint(figure: Any, results: Sequence[dict[str, Any]]) -> None:
    """Draws throughput and memory over the batch."""
    speeds, memory = figure.subplots(1, 2)
    for device in dict.fromkeys(row["device"] for row in results):
        rows = [row for row in results if row["device"] == device and "ms" in row]
        batches = [row["batch"] for row in rows]
        speeds.plot(batches, [row["examples_per_s"] for row in rows], marker="o", label=device)
        memory.plot(batches, [row["peak_mb"] for row in rows], marker="o", label=device)
        for row in rows:
            if row.get("saturates"):
                speeds.axvline(row["batch"], color="gray", linestyle="--")
    speeds.set(xlabel="batch", ylabel="examples a second", ylim=(0, None))
    memory.set(xlabel="batch", ylabel="peak memory, MB", ylim=(0, None))
    for axes in (speeds, memory):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["device"], str(row["batch"]), "", "", "", row["error"]]
    note = f"{SATURATED:.0%} of the highest" if row.get("saturates") else ""
    numbers = (f"{row['ms']:.1f}", f"{row['examples_per_s']:.0f}", f"{row['peak_mb']:.0f}")
    return [row["device"], str(row["batch"]), *numbers, note]
