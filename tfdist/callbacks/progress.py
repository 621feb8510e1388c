"""A progress bar like Keras's, with rows per second and the time spent waiting for data.

On a terminal and in a notebook, one line is redrawn in place. Elsewhere (a pipe, a job's log), it
prints one line per epoch, and one every 30 seconds within long epochs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import keras

from tfdist.callbacks import progress_line

Logs = Mapping[str, float] | None

#: Shortest time between two redraws.
_REDRAW_SECONDS = 0.05
#: Time between two lines within an epoch where nothing can be redrawn.
_LINE_SECONDS = 30.0


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Shows the progress of `fit`, `evaluate` and `predict`.

    Example:
        >>> from tfdist.callbacks.progress import ProgressBar
        >>> trainer = tfdist.Trainer(build_model, devices=2)
        >>> bar = ProgressBar(trainer.stats)  # `fit` adds one itself, unless verbose=0

    Args:
        stats: Has `examples_per_second`, `seconds_per_step` and `data_wait_share` (0 to 1) of the
            training, updated before each `on_train_batch_end`. `examples_per_second` is 0 until it
            is measured.
    """

    def __init__(self, stats: Any) -> None:
        super().__init__()
        self._stats = stats
        self.verbose: int = 1
        self.target: int | None = None
        self._trains, self._length, self._epoch = False, 0, 0
        self._began = self._drawn = 0.0

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        if self.verbose == 1 and not _can_redraw():
            self.verbose = 2

    def on_train_begin(self, logs: Logs = None) -> None:
        self._trains = True  # no progress bar for validation within fit

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._begin()
        self._epoch = epoch
        if self.verbose and self.epochs > 1:
            print(f"Epoch {epoch + 1}/{self.epochs}", flush=True)

    def on_test_begin(self, logs: Logs = None) -> None:
        if not self._trains:
            self._begin()

    def on_predict_begin(self, logs: Logs = None) -> None:
        self._begin()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._show(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self._trains:
            self._show(batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._show(batch, None)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._end(logs)

    def on_test_end(self, logs: Logs = None) -> None:
        if not self._trains:
            self._end(logs)

    def on_predict_end(self, logs: Logs = None) -> None:
        self._end(logs)

    def on_train_end(self, logs: Logs = None) -> None:
        self._trains = False

    def _begin(self) -> None:
        self.seen, self._length = 0, 0
        self._began, self._drawn = time.monotonic(), 0.0

    def _show(self, batch: int, logs: Logs) -> None:
        self.seen = batch + 1
        now = time.monotonic()
        if self.verbose == 1 and now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            line = progress_line.with_bar(*self._state(logs))
            self._length = progress_line.redraw(line, self._length)
        elif self.verbose == 2 and now - max(self._drawn, self._began) >= _LINE_SECONDS:
            self._drawn = now
            left = self._seconds_left(now - self._began)
            print(progress_line.without_bar(*self._state(logs), left), flush=True)

    def _seconds_left(self, seconds: float) -> float | None:
        """Returns the time until the last epoch ends, as far as it is known."""
        if not self.target:
            return None
        epochs = self.epochs - self._epoch - 1 if self._trains else 0
        return seconds / self.seen * (self.target * (1 + epochs) - self.seen)

    def _end(self, logs: Logs) -> None:
        if self.target is None:
            self.target = self.seen
        self.seen = self.target
        if self.verbose == 1:  # not truncated, because it is not redrawn any more
            line = progress_line.with_bar(*self._state(logs))
            print(f"\r{line.ljust(self._length)}", flush=True)
        elif self.verbose:
            print(progress_line.without_bar(*self._state(logs)), flush=True)

    def _state(self, logs: Logs) -> tuple[int, int | None, float, str, Mapping[str, float]]:
        """Returns completed and total steps, seconds, the throughput as text, and the metrics."""
        seconds = time.monotonic() - self._began
        stats = self._stats
        if self._trains and stats.examples_per_second:  # excludes the time of compilation
            pace = progress_line.pace(
                stats.seconds_per_step, stats.examples_per_second, stats.data_wait_share,
                stats.gpu_use,
            )  # fmt: skip
        else:
            pace = progress_line.pace(seconds / max(self.seen, 1), 0.0, 0.0)
        return self.seen, self.target, seconds, pace, dict(logs or {})


def _can_redraw() -> bool:
    return sys.stdout.isatty() or "ipykernel" in sys.modules or "PYCHARM_HOSTED" in os.environ
