"""Draws overview.png: the README's example on one device, two devices, and two processes.

`python docs/overview.py` trains `docs/example.py` in each setting and plots the losses it prints.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).resolve().parent
EXAMPLE = str(HERE / "example.py")
LAUNCH = ["-m", "tfdist.launch", "--num-workers", "2", "--", sys.executable]

#: Title of a setting, the devices of each host, and the command that trains in it.
SETTINGS: Sequence[tuple[str, Sequence[Sequence[str]], Sequence[str]]] = (
    ("one_device", (("device",),), [EXAMPLE, "one_device"]),
    ("mirrored", (("device", "device"),), [EXAMPLE, "mirrored"]),
    ("multi_worker", (("device",), ("device",)), [*LAUNCH, EXAMPLE, "multi_worker"]),
)
COLORS = ("#1f4e79", "#d9822b", "#3a8f5c")


def losses(arguments: Sequence[str]) -> list[float]:
    """Returns the loss of each epoch that rank 0 prints."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder, capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[1]")]
    return [float(found[1]) for line in lines if (found := re.search(r" loss: ([\d.]+)", line))]


def box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], text: str) -> None:
    """Draws a box with rounded corners and its text."""
    axes.add_patch(
        FancyBboxPatch(corner, *size, boxstyle="round,pad=0.02", facecolor="white", edgecolor="0.4")
    )
    middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2
    axes.text(*middle, text, ha="center", va="center", fontsize=8)


def hosts(axes: Axes, title: str, devices: Sequence[Sequence[str]], color: str) -> None:
    """Draws the hosts of a setting under the script that runs on them."""
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.axis("off")
    axes.set_title(f'strategy="{title}"', fontsize=9, family="monospace", color=color)
    box(axes, (0.25, 0.72), (0.5, 0.18), "train.py")
    width = 0.9 / len(devices)
    for place, names in enumerate(devices):
        left = 0.05 + place * width
        center = left + width / 2
        arrow = {"arrowstyle": "->", "color": "0.4"}
        axes.annotate("", (center, 0.62), (0.5, 0.71), arrowprops=arrow)
        box(axes, (left + 0.03, 0.08), (width - 0.06, 0.5), "")
        axes.text(center, 0.5, f"host {place + 1}", ha="center", fontsize=7, color="0.4")
        each = (width - 0.1) / len(names)
        for number, name in enumerate(names):
            box(axes, (left + 0.075 + number * each, 0.16), (each - 0.06, 0.24), name)


def main() -> None:
    """Trains, and draws the picture beside this file."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    grid = figure.add_gridspec(2, len(SETTINGS), height_ratios=(1, 1.15))
    curves = figure.add_subplot(grid[1, :])
    styles = zip(COLORS, (6, 3.2, 1.2), strict=True)
    for place, ((title, devices, arguments), (color, width)) in enumerate(
        zip(SETTINGS, styles, strict=True)
    ):
        hosts(figure.add_subplot(grid[0, place]), title, devices, color)
        values = losses(arguments)
        curves.plot(range(1, len(values) + 1), values, color=color, linewidth=width, label=title)
    curves.set(xlabel="epoch", ylabel="loss", title="The same loss everywhere", xticks=range(1, 6))
    curves.legend(frameon=False)
    curves.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "overview.png", dpi=110)


if __name__ == "__main__":
    main()
