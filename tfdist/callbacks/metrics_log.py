"""Writes metrics as JSON lines, one object per epoch."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras


class MetricsLog(keras.callbacks.Callback):
    """Appends `{"epoch", "step", "seconds", **logs}` to a file at the end of each epoch.

    `epoch` counts from 1, `step` is the optimizer's iteration, and `seconds` is the time since the
    start of training. NaN and infinite values are written as null, because JSON cannot
    represent them.

    Example:
        >>> from tfdist.callbacks.metrics_log import MetricsLog
        >>> trainer = tfdist.Trainer(build_model, devices=2)
        >>> log = MetricsLog(Path("metrics.jsonl"))
        >>> history = trainer.fit(x, y, batch_size=64, callbacks=[log], verbose=0)
        >>> sorted(json.loads(Path("metrics.jsonl").read_text()))
        ['accuracy', 'epoch', 'loss', 'seconds', 'step']

    Args:
        path: The file to append to; its folder must exist.
        stats: The trainer's statistics. If given, lines also have `examples_per_second` and
            `data_wait_share` of the epoch.
    """

    chief_only = only_reads = True

    def __init__(self, path: Path, stats: Any = None) -> None:
        super().__init__()
        self._path = path
        self._stats = stats
        self._began = time.perf_counter()

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        self._began = time.perf_counter()

    def get_state(self) -> dict[str, Any]:
        """Returns the number of lines written, and the seconds since training started."""
        return {"lines": len(self._lines()), "seconds": time.perf_counter() - self._began}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the state of a checkpoint, and drops lines of epochs that will be repeated."""
        lines = self._lines()
        if len(lines) > state["lines"]:
            os.truncate(self._path, sum(map(len, lines[: state["lines"]])))
        self._began = time.perf_counter() - state["seconds"]

    def _lines(self) -> list[bytes]:
        return self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        line: dict[str, float | None] = {
            "epoch": epoch + 1,
            "step": int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)),
            "seconds": round(time.perf_counter() - self._began, 3),
        }
        if self._stats is not None:
            line["examples_per_second"] = _finite(self._stats.examples_per_second)
            line["data_wait_share"] = _finite(self._stats.data_wait_share)
        line |= {name: _finite(value) for name, value in (logs or {}).items()}
        with self._path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
