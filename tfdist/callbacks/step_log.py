"""Writes one row per logged step and per epoch to `metrics.jsonl`, and gives it to the loggers."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.upstream.keras_model import overrides
from tfdist.upstream.keras_optimizers import unwrapped

Row = dict[str, Any]
Logs = Mapping[str, Any] | None

#: By time, a row follows after this fraction of the run's duration, within these bounds in seconds.
_FRACTION, _SHORTEST, _LONGEST = 1e-3, 1.0, 30.0


class RecentLoss:
    """The mean loss since the last update, from Keras's mean over the epoch so far.

    The difference of two means of float32 has a relative error of about 1e-7 times the number of
    updates of the epoch.

    Attributes:
        rows: Rows of the epoch so far.
    """

    def __init__(self) -> None:
        self.rows, self._updated = 0, (0, 0.0)

    @property
    def state(self) -> list[float]:
        """All values, for a checkpoint."""
        return [self.rows, *self._updated]

    @state.setter
    def state(self, state: list[float]) -> None:
        self.rows, self._updated = int(state[0]), (int(state[1]), state[2])

    def update(self, mean: float) -> float:
        """Returns the mean loss since the last update, given the mean of all rows so far."""
        rows, total = self._updated
        self._updated = self.rows, mean * self.rows
        return (self._updated[1] - total) / max(self.rows - rows, 1)


class StepLog(keras.callbacks.Callback):
    """Writes JSON lines: one object per logged step, and one per epoch.

    The row of an epoch has `epoch`, counted from 1. Every row has `step`, the number of training
    steps so far, `seconds` since the start of training, and Keras's logs, which are means over the
    epoch so far. The row of a step also has `step_loss`, the mean loss since the previous row,
    `learning_rate`, `peak_memory` of the first device in bytes, and throughput since the previous
    row; with NVML also `gpu_utilization` (mean of the epoch, 0 to 1) and `gpu_memory` in bytes.
    NaN and infinite values are null, because JSON cannot represent them.

    Rows are taken from the calls of the inner loop, so that no step waits for a log. A line that
    cannot be written is kept, and written together with the next one.

    Example:
        >>> from tfdist.callbacks.step_log import StepLog
        >>> trainer = tfdist.Trainer(build_model, devices=2, log_every=10)
        >>> log = StepLog(Path("metrics.jsonl"), trainer.stats, every=10)
        >>> history = trainer.fit(x, y, batch_size=64, callbacks=[log], verbose=0)
        >>> rows = [json.loads(line) for line in Path("metrics.jsonl").open()]
        >>> [row["step"] for row in rows if "epoch" not in row]
        [10, 20]

    Args:
        path: The file to append to; its folder must exist.
        stats: The trainer's statistics; None under plain Keras.
        every: A number of steps; `"auto"`: by time, at most once a second and at least every 30
            seconds; `"epoch"`: rows of epochs only.
    """

    chief_only = only_reads = True
    every_batch = False  # it takes what a call of the inner loop returns

    def __init__(
        self,
        path: Path,
        stats: Any = None,
        every: int | str = "epoch",
    ) -> None:
        super().__init__()
        self._path, self._stats, self._every = path, stats, every
        self._unwritten: list[str] = []
        self._validation: Row | None = None  # within an epoch, and not written yet
        self._began = self._logged_at = time.perf_counter()
        self._fit_began_at = self._steps_before = self._last_step = 0
        self._loss, self._recent = RecentLoss(), np.zeros(3)  # rows, seconds, seconds waited
        self._is_training = False

    def on_train_begin(self, logs: Logs = None) -> None:
        self._began = self._logged_at = time.perf_counter()
        self._fit_began_at, self._is_training = self._last_step, True
        self._has_mean_loss = not overrides(self.model, "train_step")
        self._tokens_per_row = _tokens_per_row(self.model)

    def send(self, row: Row) -> None:
        """Called with each row after it was written; does nothing here."""

    def get_state(self) -> dict[str, Any]:
        """Returns the number of lines written, and the position in the epoch."""
        self._add_validation()
        self._write()
        return {
            "lines": len(self._lines()),
            "seconds": time.perf_counter() - self._began,
            "steps": [self._fit_began_at, self._steps_before, self._last_step],
            "loss": self._loss.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the state of a checkpoint, and drops lines of steps that will be repeated."""
        lines = self._lines()
        if len(lines) > state["lines"]:
            os.truncate(self._path, sum(map(len, lines[: state["lines"]])))
        self._began = time.perf_counter() - state["seconds"]
        self._fit_began_at, self._steps_before, self._last_step = state["steps"]
        self._loss.state = state["loss"]

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._loss = RecentLoss()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._add_validation()
        self._last_step = step = self._steps_before + batch + 1
        if self._stats is None or self._every == "epoch":
            return
        done, seconds = self._stats.last_call.result, self._stats.last_call.seconds
        self._recent += (int(done.num_rows), seconds, float(done.seconds_waited))
        self._loss.rows += int(done.num_rows)
        now = time.perf_counter()
        if self._every == "auto":
            waits = _FRACTION * (now - self._began)
            is_due = now - self._logged_at >= min(max(waits, _SHORTEST), _LONGEST)
        else:
            is_due = (step - self._fit_began_at) % int(self._every) == 0
        if is_due:
            self._logged_at = now
            self._add(self._of_step(step, logs or {}))

    def on_test_end(self, logs: Logs = None) -> None:
        if self._is_training:  # at the end of an epoch, its row has the same values
            values = {f"val_{name}": value for name, value in (logs or {}).items()}
            self._validation = {"step": self._last_step, "seconds": self._seconds(), **values}

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._validation = None
        row: Row = {"epoch": epoch + 1, "step": self._last_step, "seconds": self._seconds()}
        self._steps_before = self._last_step
        if self._stats is not None:
            row["examples_per_second"] = self._stats.examples_per_second
            row["data_wait_share"] = self._stats.data_wait_share
        self._add(row | dict(logs or {}))

    def on_train_end(self, logs: Logs = None) -> None:
        self._is_training = False
        if self._unwritten:
            self._write(is_last=True)

    def _of_step(self, step: int, logs: Mapping[str, Any]) -> Row:
        (rows, seconds, waited), self._recent = self._recent.tolist(), np.zeros(3)
        rate = rows / max(seconds, 1e-9)
        row: Row = {"step": step, "seconds": self._seconds(), "examples_per_second": rate}
        if self._tokens_per_row:
            row["tokens_per_second"] = rate * self._tokens_per_row
        row["data_wait_share"] = min(1.0, waited / max(seconds, 1e-9))
        try:
            learning_rate = float(
                keras.ops.convert_to_numpy(unwrapped(self.model.optimizer).learning_rate)
            )
        except (AttributeError, TypeError, ValueError):  # an optimizer without one
            learning_rate = None
        row["learning_rate"] = learning_rate
        if rows and "loss" in logs and self._has_mean_loss:
            row["step_loss"] = self._loss.update(float(logs["loss"]))
        if use := self._stats.gpu_use:
            row |= {"gpu_utilization": use.busy, "gpu_memory": use.memory}
        return row | {"peak_memory": peak_memory()} | dict(logs)

    def _add_validation(self) -> None:
        if self._validation is not None:
            row, self._validation = self._validation, None
            self._add(row)

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._began, 3)

    def _add(self, row: Row) -> None:
        row = {name: _plain(value) for name, value in row.items()}
        self._unwritten.append(json.dumps(row, allow_nan=False) + "\n")
        self._write()
        self.send(row)

    def _write(self, is_last: bool = False) -> None:
        """Appends the lines that are not written yet; an error is raised only at the end."""
        try:
            with self._path.open("a") as file:
                file.write("".join(self._unwritten))
            self._unwritten = []
        except OSError as error:
            if is_last:
                raise
            if len(self._unwritten) == 1:
                print(f"warning: {error}. Training continues.", file=sys.stderr, flush=True)

    def _lines(self) -> list[bytes]:
        return self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []


def peak_memory() -> int:
    """Returns the largest use of the first GPU's memory, or of the process's, in bytes."""
    if tf.config.list_logical_devices("GPU"):
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _tokens_per_row(model: keras.Model) -> int:
    """Returns the length of a row of token numbers, if the first input has the form of one."""
    for one in keras.tree.flatten(getattr(model, "inputs", None) or [])[:1]:
        if len(one.shape) == 2 and "int" in str(one.dtype):
            return one.shape[1] or 0
    return 0


def _plain(value: Any) -> Any:
    """Returns a value that JSON can represent: a metric with several values becomes a list."""
    array = np.asarray(value)
    if array.ndim:
        return [_plain(one) for one in array]
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
