"""Plots of a classifier's validation: the confusion matrix and the worst predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_MAX_CLASSES_WITH_NUMBERS = 20
_COLUMNS, _ROWS = 4, 4  # of the worst predictions


def confusion_matrix(
    labels: np.ndarray, predicted: np.ndarray, classes: Sequence[str], path: Path
) -> np.ndarray:
    """Plots the confusion matrix.

    Args:
        labels: True classes, integers `(n,)`.
        predicted: Predicted classes, integers `(n,)`.
        classes: Names of the classes.
        path: PNG file to write.

    Returns:
        Counts, int64 `(classes, classes)`; a row is a true class.
    """
    counts = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(counts, (labels, predicted), 1)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = min(3.0 + 0.5 * len(classes), 20.0)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="true", title=f"{len(labels)} validation examples")
    ticks = range(len(classes))
    axes.set_xticks(ticks, classes, rotation=90)
    axes.set_yticks(ticks, classes)
    if len(classes) <= _MAX_CLASSES_WITH_NUMBERS:
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=color)
    figure.savefig(path, dpi=100)
    return counts


def worst_predictions(
    images: np.ndarray, labels: np.ndarray, probabilities: np.ndarray,
    classes: Sequence[str], path: Path,
) -> None:  # fmt: skip
    """Draws images with their true and predicted classes.

    Args:
        images: uint8 `(n, height, width, 1 or 3)`, the worst first; only the first 16 are drawn.
        labels: True classes, integers `(n,)`.
        probabilities: float `(n, classes)`.
        classes: Names of the classes.
        path: PNG file to write.
    """
    figure = Figure(figsize=(3 * _COLUMNS, 3.3 * _ROWS), layout="constrained")
    FigureCanvasAgg(figure)
    for i, axes in enumerate(figure.subplots(_ROWS, _COLUMNS).flat):
        axes.axis("off")
        if i < len(images):
            guess = int(probabilities[i].argmax())
            axes.imshow(images[i].squeeze(), cmap="gray")
            axes.set_title(
                f"true: {classes[labels[i]]}\n"
                f"predicted: {classes[guess]} ({probabilities[i, guess]:.0%})"
            )
    figure.savefig(path, dpi=100)


NUM_WORST = _COLUMNS * _ROWS
