"""Table and chart of the all-reduce benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.bench.allreduce.measure import COPY
from tfdist.console import files, sizes, tables


def show(results: Sequence[dict[str, Any]], absent: Mapping[str, str]) -> None:
    """Prints bandwidths by size and engine, and which engines there are none of."""
    tables.numbers(
        ("bytes", *results[0]["engines"]),
        [
            (sizes.in_words(result["bytes"]), *(_cell(*own) for own in result["engines"].items()))
            for result in results
        ],
        title="bus bandwidth, GB/s (fraction of a memory copy's)",
        num_names=0,
    )
    for name, why in absent.items():
        tables.text(f"{name} is left out: {why}.")


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the bandwidths over the sizes, with the quartiles around them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    asked = [result["bytes"] for result in results]
    for name in results[0]["engines"]:
        spreads = [result["engines"][name]["gb_per_s"] for result in results]
        style: dict[str, Any] = {"marker": "o"}
        if name == COPY:
            style = {"color": "gray", "linestyle": "--"}
        (line,) = axes.plot(asked, [s["median"] for s in spreads], label=name, **style)
        low, high = ([s[end] for s in spreads] for end in ("low", "high"))
        axes.fill_between(asked, low, high, color=line.get_color(), alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
    axes.set_title("All-reduce over two replicas: medians and quartiles")
    axes.grid(alpha=0.3)
    axes.legend()
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _cell(name: str, own: dict[str, Any]) -> str:
    bandwidth = f"{own['gb_per_s']['median']:.3g}"
    return bandwidth if name == COPY else f"{bandwidth} ({own['of_memory_copy']['median']:.0%})"
