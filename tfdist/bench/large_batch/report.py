"""Table and chart of accuracy against the batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.console import files, table_files, tables
from tfdist.errors import ConfigurationError

NOTE = (
    "Per cent of the held-out fifth of the digits that are told right after the last epoch: the "
    "median of the seeds, with the lowest and the highest. All runs see the data equally often."
)
Results = Sequence[dict[str, Any]]


def read(path: Path) -> Results:
    """Returns the runs that `--json` wrote.

    Raises:
        ConfigurationError: There is no such file, or another benchmark wrote it.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
        if document["benchmark"] == "large_batch":
            return document["results"]
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise ConfigurationError(f"--add {path}: expected a file that --json of large_batch wrote.")


def show(results: Results) -> None:
    """Prints the table."""
    header, *rows = _rows(results)
    tables.numbers(header, rows, title="accuracy by global batch and way of setting the rate")


def write(results: Results, path: Path) -> None:
    """Writes the table as Markdown."""
    header, *rows = _rows(results)
    table_files.write(path, header, rows)


def draw(results: Results, path: Path) -> None:
    """Draws a line for each way, with the range of the seeds around it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for way in _in_order(results, "way"):
        batches = _in_order(results, "batch_size")
        found = [_accuracies(results, way, batch) for batch in batches]
        axes.plot(batches, [np.median(own) for own in found], marker="o", label=way)
        axes.fill_between(batches, [min(own) for own in found], [max(own) for own in found],
                          alpha=0.15)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(_in_order(results, "batch_size"), _in_order(results, "batch_size"))
    axes.set(xlabel="global batch", ylabel="accuracy on held-out digits")
    axes.legend()
    axes.grid(alpha=0.3)
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=100)


def _rows(results: Results) -> list[list[str]]:
    """The header, and a row for each batch."""
    ways = _in_order(results, "way")
    rows = [["batch", *ways]]
    for batch in _in_order(results, "batch_size"):
        rows.append([str(batch), *(_cell(_accuracies(results, way, batch)) for way in ways)])
    return rows


def _cell(accuracies: list[float]) -> str:
    median, low, high = (100 * f(accuracies) for f in (np.median, min, max))
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


def _accuracies(results: Results, way: str, batch: int) -> list[float]:
    return [
        own["val_accuracy"] for own in results if (own["way"], own["batch_size"]) == (way, batch)
    ]


def _in_order(results: Results, name: str) -> list[Any]:
    return list(dict.fromkeys(own[name] for own in results))
