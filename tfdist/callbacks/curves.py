"""Plots the training curves to an image file while the run progresses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
from matplotlib.figure import Figure

from tfdist.console import figures
from tfdist.console.figures import Curve
from tfdist.console.files import replacing

# Drawing takes about 0.2 s, which is too much after every epoch if epochs are short.
_REDRAW_SECONDS = 10.0
_MAX_COLUMNS = 3


class Curves(keras.callbacks.Callback):
    """Plots each metric over the epochs, training and validation in one panel.

    Example:
        >>> from tfdist.callbacks.curves import Curves
        >>> trainer = tfdist.Trainer(build_model, devices=2)
        >>> curves = Curves(Path("curves.png"), title="digits")
        >>> history = trainer.fit(x, y, batch_size=64, callbacks=[curves], verbose=0)
        >>> Path("curves.png").exists()
        True

    Args:
        path: The PNG file to write. It is replaced atomically, so that a viewer never reads an
            incomplete file.
        title: Title of the figure; empty for none.
    """

    chief_only = only_reads = True

    def __init__(self, path: Path, title: str = "") -> None:
        super().__init__()
        self._path, self._title = path, title
        self._epochs: list[int] = []
        self._curves: dict[str, list[float]] = {}
        self._drawn_at = 0.0

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        self._drawn_at = time.perf_counter()

    def get_state(self) -> dict[str, Any]:
        """Returns the epochs and metrics recorded so far."""
        return {"epochs": self._epochs, "curves": self._curves}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the epochs and metrics of a checkpoint."""
        self._epochs, self._curves = state["epochs"], state["curves"]

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        for name, value in (logs or {}).items():
            # With validation_freq, a metric may have no value for the first epochs.
            curve = self._curves.setdefault(name, [float("nan")] * len(self._epochs))
            curve.append(float(value))
        self._epochs.append(epoch + 1)
        for curve in self._curves.values():
            curve.extend([float("nan")] * (len(self._epochs) - len(curve)))
        if time.perf_counter() - self._drawn_at > _REDRAW_SECONDS:
            self._draw()

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        if self._epochs:
            self._draw()

    def _draw(self) -> None:
        with replacing(self._path) as path:
            figure(self._epochs, self._curves, self._title).savefig(path, dpi=100)
        self._drawn_at = time.perf_counter()


def figure(epochs: Sequence[int], curves: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Plots each metric in a panel, training and validation together."""
    labels = {"": "training", "val_": "validation"}
    panels = {
        name: [
            Curve(label, epochs, curves[prefix + name])
            for prefix, label in labels.items()
            if prefix + name in curves
        ]
        for name in dict.fromkeys(name.removeprefix("val_") for name in curves)
    }
    result = figures.panels(panels, "epoch", title=title, columns=_MAX_COLUMNS, size=(5.0, 4.0))
    for axes in result.axes:
        axes.set(xlim=(epochs[0] - 0.5, epochs[-1] + 0.5))
    return result
