"""The stages of reading as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from pipelines.profile.stages import Stage


def draw(stages: Sequence[Stage], path: Path) -> None:
    """Draws the stages as bars."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(6, 0.6 + 0.45 * len(stages)), layout="constrained")
        axes = figure.subplots()
        names = [stage.name for stage in stages]
        bars = axes.barh(names, [stage.microseconds for stage in stages], color="tab:blue")
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.invert_yaxis()
        axes.set_xlabel("microseconds per record")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)
