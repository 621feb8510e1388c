"""Table and chart of the strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.bench.outputs import Outputs
from tfdist.console import tables

_NOTE = (
    "Medians, quartiles in brackets. 'efficiency': examples a second of a replica, to those of one "
    "device, which has all cores of a CPU to itself where replicas share them. 'exchange': a sum "
    "of as many bytes as the gradients have, measured by itself, to a step; 'data': waiting for "
    "them; the rest is computing. The fastest is first."
)
_HEADER = ("strategy", "replicas", "examples/s", "efficiency", "compute", "exchange", "data", "MB")


def conclude(
    benchmark: str,
    title: str,
    results: Sequence[dict[str, Any]],
    absent: Mapping[str, str],
    output: Outputs,
) -> None:
    """Prints the table and who is left out, and writes and draws what is wanted."""
    output.show(_HEADER, [_cells(row) for row in results], title)
    for name, why in absent.items():
        tables.text(f"{name} is left out: {why}")
    tables.text(_NOTE)
    output.conclude(benchmark, results, _paint, width=8)


def _paint(figure: Any, results: Sequence[dict[str, Any]]) -> None:
    """Draws how many examples a second each strategy takes."""
    axes = figure.subplots()
    medians = [row["examples_per_s"]["median"] for row in results]
    low = [row["examples_per_s"]["median"] - row["examples_per_s"]["low"] for row in results]
    high = [row["examples_per_s"]["high"] - row["examples_per_s"]["median"] for row in results]
    places = range(len(results))
    axes.barh(places, medians, xerr=[low, high], capsize=3)
    axes.set_yticks(places, [row["strategy"] for row in results])
    axes.invert_yaxis()
    axes.set(xlabel="examples a second")


def _cells(row: dict[str, Any]) -> list[str]:
    speed = "{median:.0f} ({low:.0f}-{high:.0f})".format(**row["examples_per_s"])
    compute = 1 - row["exchange"] - row["data"]
    shares = (row["efficiency"], compute, row["exchange"], row["data"])
    fractions = [f"{share:.0%}" for share in shares]
    return [row["strategy"], str(row["replicas"]), speed, *fractions, f"{row['peak_mb']:.0f}"]
