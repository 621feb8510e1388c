"""A progress bar like Keras's, with rows per second and the time spent waiting for data.

On a terminal and in a notebook, one line is redrawn in place. Elsewhere (a pipe, a job's log), it
prints one line per epoch, and one every 30 seconds within long epochs.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import keras
import numpy as np

from tfdist.console import units
from tfdist.devices import GpuUse

Logs = Mapping[str, float] | None

#: Shortest time between two redraws.
_REDRAW_SECONDS = 0.05
#: Time between two lines within an epoch where nothing can be redrawn.
_LINE_SECONDS = 30.0
_BAR = 20


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
            line = with_bar(*self._state(logs))
            self._length = redraw(line, self._length)
        elif self.verbose == 2 and now - max(self._drawn, self._began) >= _LINE_SECONDS:
            self._drawn = now
            left = self._seconds_left(now - self._began)
            print(without_bar(*self._state(logs), left), flush=True)

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
            line = with_bar(*self._state(logs))
            print(f"\r{line.ljust(self._length)}", flush=True)
        elif self.verbose:
            print(without_bar(*self._state(logs)), flush=True)

    def _state(self, logs: Logs) -> tuple[int, int | None, float, str, Mapping[str, float]]:
        """Returns completed and total steps, seconds, the throughput as text, and the metrics."""
        seconds = time.monotonic() - self._began
        stats = self._stats
        if self._trains and stats.examples_per_second:  # excludes the time of compilation
            rate = pace(
                stats.seconds_per_step, stats.examples_per_second, stats.data_wait_share,
                stats.gpu_use,
            )  # fmt: skip
        else:
            rate = pace(seconds / max(self.seen, 1), 0.0, 0.0)
        return self.seen, self.target, seconds, rate, dict(logs or {})


def _can_redraw() -> bool:
    return sys.stdout.isatty() or "ipykernel" in sys.modules or "PYCHARM_HOSTED" in os.environ


def without_bar(
    made: int,
    target: int | None,
    seconds: float,
    pace: str,
    logs: Mapping[str, float],
    seconds_left: float | None = None,
) -> str:
    """Returns a line for a log: `4/4 - 1s - 8ms/step - 7.8k rows/s - loss: 0.1234`."""
    left = [] if seconds_left is None else [f"ETA {timedelta(seconds=round(seconds_left))}"]
    head = [f"{made}/{target or made}", f"{seconds:.0f}s", *left]
    return " - ".join([*head, pace, *_metrics(logs)])


def with_bar(
    made: int, target: int | None, seconds: float, pace: str, logs: Mapping[str, float]
) -> str:
    """Returns the line for a terminal, with a bar and the remaining time."""
    if not target:
        return " - ".join([f"{made}/Unknown", f"{seconds:.0f}s {pace}", *_metrics(logs)])
    done = min(_BAR, _BAR * made // target)
    left = seconds / made * (target - made) if made else 0.0
    count = f"{made:{len(str(target))}d}/{target} {'━' * done}{'╺' * (_BAR - done)}"
    return " - ".join(
        [f"{count} {left if made < target else seconds:.0f}s {pace}", *_metrics(logs)]
    )


def redraw(line: str, length_before: int) -> int:
    """Overwrites the previous line, truncated to the terminal, and returns the new length."""
    width = shutil.get_terminal_size().columns - 1  # some terminals wrap at the last column
    shown = line if len(line) <= width else f"{line[: width - 1]}…"
    sys.stdout.write(f"\r{shown.ljust(length_before)}")
    sys.stdout.flush()
    return len(shown)


def pace(
    seconds_per_step: float,
    rows_per_second: float,
    data_wait_share: float,
    gpu_use: GpuUse | None = None,
) -> str:
    """Returns `8ms/step - 7.8k rows/s - waiting for data 12 %`; without rows, the first part.

    With the use of GPUs, ` - GPU 87 %, 10.2 GB` follows.
    """
    if seconds_per_step >= 1 or seconds_per_step == 0:
        duration = f"{seconds_per_step:.0f}s/step"
    elif seconds_per_step >= 1e-3:
        duration = f"{seconds_per_step * 1e3:.0f}ms/step"
    else:
        duration = f"{seconds_per_step * 1e6:.0f}us/step"
    parts = [duration]
    if rows_per_second:
        parts += [f"{short(rows_per_second)} rows/s", f"waiting for data {data_wait_share:.0%}"]
    if gpu_use:
        parts.append(f"GPU {gpu_use.busy:.0%}, {units.format_bytes(gpu_use.memory)}")
    return " - ".join(parts).replace("%", " %")


def short(number: float) -> str:
    """Returns a number with a metric prefix: `7.8k`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def _metrics(logs: Mapping[str, float]) -> list[str]:
    return [f"{name}: {_number(float(np.mean(value)))}" for name, value in logs.items()]


def _number(value: float) -> str:
    plain = not math.isfinite(value) or value == 0 or abs(value) > 1e-3
    return f"{value:.4f}" if plain else f"{value:.4e}"
