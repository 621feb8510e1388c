"""Draws how_it_works.png: the files that a global batch passes. `python docs/how_it_works.py`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

#: Title, left edge, and the files with what each does, from top to bottom.
COLUMNS = (
    ("Python, once per call", 0.02, (
        ("trainer.py", "fit checks its arguments"),
        ("loops/data_handler.py, data_order.py", "global batches in an order that can be resumed"),
        ("loops/fit.py", "epochs, callbacks, validation, checkpoints"),
        ("loops/functions.py", "builds the model, traces the steps"),
        ("loops/epoch.py", "calls the inner loop until the data end"),
    )),
    ("one tf.function, once per step", 0.35, (
        ("strategies/inner_loop.py", "a loop over steps"),
        ("strategies/feed.py", "a batch becomes per-replica batches"),
        ("step/step.py", "compute, all-reduce, apply"),
        ("step/loss_scaling.py", "unscale, one finite check"),
        ("step/state.py", "metrics and state of all replicas"),
    )),
    ("on each replica", 0.68, (
        ("step/replica_runner.py", "runs all replicas"),
        ("replica/scope.py, replica.py", "assignments are kept aside"),
        ("step/forward_backward.py", "outputs, loss, gradients"),
        ("step/loss.py", "divisors of the global batch"),
        ("strategies/mirrored.py", "sums over the replicas"),
    )),
)  # fmt: skip
COLORS = ("#1f4e79", "#d9822b", "#3a8f5c")


def column(
    axes: Axes, title: str, left: float, files: tuple[tuple[str, str], ...], color: str
) -> None:
    """Draws the boxes of a column with arrows between them."""
    axes.text(left + 0.15, 0.97, title, ha="center", color=color, fontsize=10, weight="bold")
    for row, (file, text) in enumerate(files):
        top = 0.9 - 0.18 * row
        shape = FancyBboxPatch(
            (left, top - 0.11), 0.3, 0.11,
            boxstyle="round,pad=0.01", facecolor="white", edgecolor=color,
        )  # fmt: skip
        axes.add_patch(shape)
        axes.text(
            left + 0.15, top - 0.035, file, ha="center", va="center", fontsize=8, family="monospace"
        )
        axes.text(left + 0.15, top - 0.08, text, ha="center", va="center", fontsize=8)
        if row:
            arrow = {"arrowstyle": "->", "color": color}
            axes.annotate(
                "", (left + 0.15, top + 0.01), (left + 0.15, top + 0.06), arrowprops=arrow
            )


def main() -> None:
    """Draws the picture beside this file."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.axis("off")
    for (title, left, files), color in zip(COLUMNS, COLORS, strict=True):
        column(axes, title, left, files, color)
    # The outer loop calls the inner one; a step runs the replicas.
    for start, end in (((0.33, 0.125), (0.34, 0.845)), ((0.66, 0.485), (0.67, 0.845))):
        axes.annotate("", end, start, arrowprops={"arrowstyle": "->"})
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
