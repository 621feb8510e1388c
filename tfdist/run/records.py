"""Reads what a run has written: its rows, and where its time went. Imports no TensorFlow."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pipelines
from pipelines.storage import AnyPath

#: What each kind of time is, in the order of tables. `compute` alone is useful work.
KINDS = {
    "start": "start",
    "nodes": "waiting for nodes",
    "compile": "tracing and compiling",
    "data": "waiting for data",
    "compute": "compute and exchange",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "results": "saving and reporting results",
    "other": "Python and loggers",
    "lost": "lost work",
    "down": "between processes",
}


def read_rows(folder: AnyPath) -> list[dict[str, Any]]:
    """Returns the complete lines of a run's `metrics.jsonl`; empty if the file does not exist."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # the run is writing this line, or was killed while it wrote it
    return rows


@dataclass
class Ledger:
    """The time of a run.

    Attributes:
        seconds: Seconds by kind; their sum is the time from the first start to the last entry.
        steps: Number of steps of the run.
        failures: Number of processes that did not finish and were not stopped on purpose.
        saves: Number of checkpoints.
        save_seconds: Time of the training for all of them.
        exchange: Seconds that the exchange of a step takes alone; None if it was not measured.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    failures: int = 0
    saves: int = 0
    save_seconds: float = 0.0
    exchange: float | None = None

    @property
    def wall(self) -> float:
        """Seconds from the first start to the last entry."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The fraction of the time in which steps were computed that the run has kept."""
        return self.seconds.get("compute", 0.0) / max(self.wall, 1e-9)

    def checkpoint_interval(self) -> float | None:
        """Returns the best time between two checkpoints, in seconds; None without a failure.

        Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
        equation 37, whose first term is Young's (1974).
        """
        if not (self.failures and self.saves):
            return None
        save, between = self.save_seconds / self.saves, self.wall / self.failures
        if save >= 2 * between:
            return between
        ratio = save / (2 * between)
        return math.sqrt(2 * save * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def read_ledger(folder: AnyPath) -> Ledger | None:
    """Returns the ledger of a run folder; None if it has none."""
    try:
        attempts: list[dict[str, Any]] = json.loads((folder / "ledger.json").read_bytes())
    except (FileNotFoundError, ValueError, pipelines.DataError):
        return None
    ledger = Ledger(dict.fromkeys(KINDS, 0.0))
    previous: float | None = None
    for attempt in attempts:
        if previous is not None:
            ledger.seconds["down"] += max(0.0, attempt["began"] - previous)
        previous = attempt["at"]
        kept = attempt.get("kept", attempt["seconds"])
        for name, booked in attempt["seconds"].items():
            ledger.seconds[name] += kept.get(name, 0.0)
            ledger.seconds["lost"] += booked - kept.get(name, 0.0)
        ledger.saves += attempt["saves"]
        ledger.save_seconds += attempt["seconds"]["checkpoints"]
        ledger.failures += not attempt.get("ended", attempt is attempts[-1])
        ledger.steps = attempt["step"]
        ledger.exchange = attempt.get("exchange", ledger.exchange)
    return ledger
