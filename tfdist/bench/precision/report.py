"""Table and chart of the number formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.bench.outputs import Outputs

_HEADER = ("precision", "device", "ms a step", "examples/s", "peak MB", "accuracy", "loss")


def show(
    results: Sequence[dict[str, Any]], model: str, batch: int, epochs: int, output: Outputs
) -> None:
    """Prints the table, and writes it where wanted."""
    title = f"{model}, batch {batch}; accuracy on held-out digits after {epochs} epochs"
    output.show(_HEADER, [_cells(row) for row in results], title)


def paint(figure: Any, results: Sequence[dict[str, Any]]) -> None:
    """Draws speed, memory and accuracy side by side."""
    names = [row["precision"].removeprefix("mixed_") for row in results]
    parts = {
        "examples a second": "examples_per_s", "peak memory, MB": "peak_mb",
        "accuracy on held-out digits": "val_accuracy",
    }  # fmt: skip
    for axes, (title, key) in zip(figure.subplots(1, len(parts)), parts.items(), strict=True):
        axes.bar(names, [row[key] for row in results])
        axes.set_title(title)


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = (f"{row['ms']:.1f}", f"{row['examples_per_s']:.0f}", f"{row['peak_mb']:.0f}")
    quality = (f"{row['val_accuracy']:.3f}", f"{row['val_loss']:.3f}")
    return [row["precision"], row["device"], *numbers, *quality]
