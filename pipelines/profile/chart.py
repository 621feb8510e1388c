"""The stages of reading as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from pipelines.profile.stages import Stage


def draw(stages: Sequence[Stage], title: str, path: Path) -> Figure:
    """Draws the stages as bars into a file."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(6, 1.0 + 0.45 * len(stages)), layout="constrained")
        axes = figure.subplots()
        names = [stage.name for stage in stages]
        bars = axes.barh(names, [stage.microseconds for stage in stages], color="tab:blue")
        axes.bar_label(bars, fmt="{:,.1f}", padding=3)
        axes.margins(x=0.25)  # for the number beside the longest bar
        axes.set_title(title)
        axes.invert_yaxis()
        axes.set_xlabel("microseconds per record")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)
    return figure
