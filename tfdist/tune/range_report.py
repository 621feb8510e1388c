"""The chart of a range test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfdist.console import files
from tfdist.tune.range_test import Point


def draw(points: Sequence[Point], path: Path) -> None:
    """Draws the losses of the batches, and their average, over the rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    rates = [point.rate for point in points]
    axes.plot(rates, [point.loss for point in points], color="gray", alpha=0.4, label="of a batch")
    smoothed = [point.smoothed for point in points]
    axes.plot(rates, smoothed, label="smoothed")
    highest = max(smoothed[:1] + smoothed[: len(smoothed) // 2])
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss", ylim=(0, 2 * highest))
    axes.legend()
    axes.grid(alpha=0.3)
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=100)
