"""The progress line: Keras's own, with examples per second and the share of time data kept waiting.

On a terminal and in a notebook one line is redrawn in place; elsewhere (a pipe, a job's log) there
is one line per epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import keras


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Shows `fit`, `evaluate` and `predict` as they go.

    Args:
        stats: Has `examples_per_second` and `data_wait_share` (0 to 1), kept up to date before
            each `on_train_batch_end`; 0 examples per second are ones not yet measured.
        unit: What an example is called.
    """

    def __init__(self, stats: Any, unit: str = "images") -> None:
        super().__init__()
        self._stats, self._unit = stats, unit
        self.verbose: int = 1

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        if self.verbose == 1 and not _can_redraw():
            self.verbose = 2

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        super().on_train_batch_end(batch, self._with_speed(logs))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        super().on_epoch_end(epoch, self._with_speed(logs))

    def _with_speed(self, logs: Mapping[str, float] | None) -> dict[str, float]:
        speed: dict[str, float] = {}
        if self._stats.examples_per_second:
            speed[f"{self._unit}/s"] = round(self._stats.examples_per_second)
            speed["data_wait"] = self._stats.data_wait_share
        return dict(logs or {}) | speed


def _can_redraw() -> bool:
    return sys.stdout.isatty() or "ipykernel" in sys.modules or "PYCHARM_HOSTED" in os.environ
