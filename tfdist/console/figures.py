"""Draws the curves of metrics, one panel for each metric. Imports no TensorFlow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


class Curve(NamedTuple):
    """A line in a panel: its name in the legend, and its points."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def panels(
    curves: Mapping[str, Sequence[Curve]],
    xlabel: str,
    *,
    title: str = "",
    columns: int = 1,
    size: tuple[float, float] = (5.0, 3.5),
) -> Figure:
    """Draws the curves of each metric in a panel with its name.

    Args:
        curves: The curves by metric.
        xlabel: What x counts: `"epoch"` or `"step"`.
        title: Title of the figure.
        columns: The largest number of panels in a row.
        size: Width and height of a panel in inches.
    """
    columns = max(min(len(curves), columns), 1)
    rows = max(math.ceil(len(curves) / columns), 1)
    # Not pyplot, which has global state and may need a window system.
    result = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(result)
    result.suptitle(title)
    grid = result.subplots(rows, columns, squeeze=False).flat
    for axes, metric in itertools.zip_longest(grid, curves):
        if metric is None:
            axes.remove()
            continue
        for label, x, y in curves[metric]:
            axes.plot(x, y, marker=".", markersize=4, label=label)
        axes.set(title=metric, xlabel=xlabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        axes.legend()
    return result
