"""The progress line: Keras's, with images per second and the share of time spent waiting for data.

It owns what a person sees while a call runs. It reads the numbers from the trainer's `stats` and
measures nothing but the time of a step. On a terminal and in a notebook one line is redrawn in
place; elsewhere (a pipe, a job's log) there is one line per epoch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import keras

_WIDTH = 20  # of the bar, in characters
_REDRAW_SECONDS = 0.1


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Shows fit, evaluate and predict as they go.

    A ProgbarLogger by type, so that whoever looks for a progress bar among callbacks finds this.

    Args:
        stats: Has `examples_per_second` and `data_wait_share` (0 to 1), kept up to date before
            each `on_train_batch_end`; 0 examples per second are ones not yet measured.
        unit: What an example is called.
    """

    def __init__(self, stats: Any, unit: str = "images") -> None:
        super().__init__()
        self._stats = stats
        self._unit = unit
        self._in_fit = False
        self._traced = False
        self._start()

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        self._in_fit = True

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        self._in_fit = False

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self._start()
        self._epoch = f"Epoch {epoch + 1}/{self.epochs}"
        if self._mode == 1:
            print(self._epoch, flush=True)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        self._step(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self._finish(logs)

    # Validation inside fit is silent, as Keras's: its results stand at the end of the epoch's line.

    def on_test_begin(self, logs: Mapping[str, float] | None = None) -> None:
        if not self._in_fit:
            self._start()

    def on_test_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        if not self._in_fit:
            self._step(batch, logs)

    def on_test_end(self, logs: Mapping[str, float] | None = None) -> None:
        if not self._in_fit:
            self._finish(logs)

    def on_predict_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._start()

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._step(batch, None)  # the logs are the predictions

    def on_predict_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._finish(None)

    @property
    def _mode(self) -> int:
        """Keras's verbosity: 0, 1 or 2; 1 becomes 2 where a line cannot be redrawn."""
        return 2 if self.verbose == 1 and not _can_redraw() else self.verbose

    def _start(self) -> None:
        self._seen = 0
        self._epoch = ""
        self._shown_width = 0
        self._shown_at = 0.0
        self._began = self._ended = time.perf_counter()
        # From which step, and when, steps are timed: not the very first call, which traces.
        self._timed_from = (0, self._began) if self._traced else None

    def _step(self, batch: int, logs: Mapping[str, float] | None) -> None:
        self._seen, self._ended = batch + 1, time.perf_counter()
        if self._timed_from is None:
            self._timed_from, self._traced = (self._seen, self._ended), True
        if self._mode == 1 and self._ended - self._shown_at > _REDRAW_SECONDS:
            self._redraw(logs)
            self._shown_at = self._ended

    def _finish(self, logs: Mapping[str, float] | None) -> None:
        if self._mode == 1:
            self._redraw(logs)
            print(flush=True)
        elif self._mode == 2:
            parts = [self._epoch, f"{self._seen} steps", self._time(), *self._facts(logs)]
            print(" - ".join(part for part in parts if part), flush=True)

    def _redraw(self, logs: Mapping[str, float] | None) -> None:
        line = " - ".join([f"{self._bar()} {self._time()}", *self._facts(logs)])
        print("\r" + line.ljust(self._shown_width), end="", flush=True)
        self._shown_width = len(line)

    def _bar(self) -> str:
        if not self.target:
            return f"{self._seen}/?"
        full = min(_WIDTH, _WIDTH * self._seen // self.target)
        return (
            f"{self._seen:>{len(str(self.target))}}/{self.target} "
            + "━" * full
            + "─" * (_WIDTH - full)
        )

    def _time(self) -> str:
        """Seconds since the start, and the time of a step, without the first call that traces."""
        words = f"{time.perf_counter() - self._began:.0f}s"
        first, since = self._timed_from or (self._seen, 0.0)
        if self._seen > first:
            words += f" {1000 * (self._ended - since) / (self._seen - first):.3g}ms/step"
        return words

    def _facts(self, logs: Mapping[str, float] | None) -> list[str]:
        facts = [f"{name}: {float(value):.4g}" for name, value in (logs or {}).items()]
        if self._in_fit and self._stats.examples_per_second:
            facts.append(f"{self._stats.examples_per_second:.0f} {self._unit}/s")
            facts.append(f"data wait {self._stats.data_wait_share:.0%}")
        return facts


def _can_redraw() -> bool:
    return sys.stdout.isatty() or "ipykernel" in sys.modules or "PYCHARM_HOSTED" in os.environ
