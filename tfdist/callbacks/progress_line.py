"""The text of the progress bar, fitted to the width of the terminal."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping
from datetime import timedelta

import numpy as np

from tfdist.console import sizes
from tfdist.devices import GpuUse

_BAR = 20


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
    parts = [_duration(seconds_per_step)]
    if rows_per_second:
        parts += [f"{short(rows_per_second)} rows/s", f"waiting for data {data_wait_share:.0%}"]
    if gpu_use:
        parts.append(f"GPU {gpu_use.busy:.0%}, {sizes.format_bytes(gpu_use.memory)}")
    return " - ".join(parts).replace("%", " %")


def short(number: float) -> str:
    """Returns a number with a metric prefix: `7.8k`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def _duration(seconds: float) -> str:
    """Returns the time per step in the format of Keras's progress bar."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.0f}s/step"
    return f"{seconds * 1e3:.0f}ms/step" if seconds >= 1e-3 else f"{seconds * 1e6:.0f}us/step"


def _metrics(logs: Mapping[str, float]) -> list[str]:
    return [f"{name}: {_number(float(np.mean(value)))}" for name, value in logs.items()]


def _number(value: float) -> str:
    plain = not math.isfinite(value) or value == 0 or abs(value) > 1e-3
    return f"{value:.4f}" if plain else f"{value:.4e}"
