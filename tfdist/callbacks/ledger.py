"""Books each second of a run, over all restarts, in `ledger.json` of its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import psutil

from tfdist.console.files import replacing

Logs = Mapping[str, Any] | None

#: Shortest time between two writes, in seconds.
_WRITE_SECONDS = 2.0


class LedgerLog(keras.callbacks.Callback):
    """Books the time of a process by what it was spent on.

    The first call of the inner loop counts as compilation. A gap between two calls in which a
    checkpoint was taken counts as that. What is left is Python: callbacks, loggers, and exchange
    between workers. A resumed run notes which part of the interrupted process's work was kept.

    Example:
        >>> from tfdist.callbacks.ledger import LedgerLog
        >>> trainer = tfdist.Trainer(build_model, devices=2)
        >>> ledger = LedgerLog(Path("ledger.json"), trainer.stats)
        >>> history = trainer.fit(x, y, batch_size=64, callbacks=[ledger], verbose=0)
        >>> len(json.loads(Path("ledger.json").read_text()))  # processes so far
        1

    Args:
        path: The file; it has one entry per process.
        stats: The trainer's statistics.
        waited: Seconds that this process has waited for other processes to start.
    """

    chief_only = only_reads = True
    every_batch = False

    def __init__(self, path: Path, stats: Any, waited: float = 0.0) -> None:
        super().__init__()
        self._path, self._stats, self._waited = path, stats, waited
        self._attempts: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self._begin(psutil.Process().create_time())

    def begin_again(self) -> None:
        """Books what follows apart, as if another process had resumed the run."""
        self._write()
        self._begin(time.time())

    def on_train_begin(self, logs: Logs = None) -> None:
        self._seconds["nodes"], self._waited = self._waited, 0.0
        self._seconds["start"] = time.time() - self._began - self._seconds["nodes"]
        self._marked_at = time.perf_counter()
        self._write()

    def get_state(self) -> dict[str, Any]:
        """Returns what has been booked; it is called for each checkpoint."""
        self._has_saved = True
        return {"began": self._began, "seconds": self._booked(), "step": self._own["step"]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Notes how much of an earlier process's work is in its checkpoint."""
        for attempt in self._attempts[:-1]:
            if attempt["began"] == state["began"]:
                attempt["kept"] = state["seconds"]
            elif attempt["began"] > state["began"]:
                attempt["kept"] = {}  # the run resumes from before it
        self._own["step"] = self._own["resumed"] = state["step"]

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._book_gap()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        call = self._stats.last_call
        self._own["step"] += int(call.result.num_steps)
        if self._seconds["compile"]:
            waited = min(float(call.result.seconds_waited), call.seconds)
            self._seconds["data"] += waited
            self._seconds["compute"] += call.seconds - waited
        else:
            self._seconds["compile"] = call.seconds
            if "resumed" not in self._own:  # started again from the beginning
                self._attempts[:-1] = [one | {"kept": {}} for one in self._attempts[:-1]]
        self._marked_at = time.perf_counter()
        self._write(is_due=False)

    def on_test_begin(self, logs: Logs = None) -> None:
        self._book_gap()

    def on_test_end(self, logs: Logs = None) -> None:
        self._seconds["evaluation"] += time.perf_counter() - self._marked_at
        self._marked_at = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._book_gap()
        self._write(is_due=False)

    def close(self, ended: bool) -> None:
        """Writes the state at the end of the training.

        Args:
            ended: Whether the training is complete, or was stopped on purpose.
        """
        self._own["ended"], self._marked_at = ended, time.perf_counter()
        self._write()

    def finish(self, exchange: float | None = None) -> None:
        """Books the time since `close` as that of the results.

        Args:
            exchange: Seconds of a step's exchange alone, if it was measured.
        """
        self._seconds["results"] = time.perf_counter() - self._marked_at
        if exchange is not None:
            self._own["exchange"] = exchange
        self._write()

    def _begin(self, began: float) -> None:
        self._began = began
        self._own: dict[str, Any] = {"began": began, "step": 0, "saves": 0}
        self._attempts.append(self._own)
        kinds = (
            "start", "nodes", "compile", "data", "compute", "evaluation", "checkpoints", "results"
        )  # fmt: skip
        self._seconds = dict.fromkeys(kinds, 0.0)
        self._marked_at = self._written_at = 0.0
        self._has_saved = False

    def _book_gap(self) -> None:
        if self._has_saved:
            self._seconds["checkpoints"] += time.perf_counter() - self._marked_at
            self._own["saves"] += 1
            self._has_saved = False
        self._marked_at = time.perf_counter()

    def _booked(self) -> dict[str, float]:
        other = time.time() - self._began - sum(self._seconds.values())
        return {name: round(value, 3) for name, value in (self._seconds | {"other": other}).items()}

    def _write(self, is_due: bool = True) -> None:
        if not is_due and time.perf_counter() - self._written_at < _WRITE_SECONDS:
            return
        self._own |= {"seconds": self._booked(), "at": time.time()}
        self._written_at = time.perf_counter()
        with suppress(OSError), replacing(self._path) as path:  # if the disk is full
            path.write_text(json.dumps(self._attempts, indent=1) + "\n")
