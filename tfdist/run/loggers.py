"""`--logger`: TensorBoard, CSV, MLflow and Weights & Biases get the rows of `metrics.jsonl`.

Each logger follows the rows in a thread, so that a slow or broken one neither slows nor ends a
training. `loggers.json` in the run folder has the ID of its run and the last row that it got: a
resumed run continues there. Because resuming is exact, rows that a logger has already got are the
same ones and are not sent again; rows that it did not get are read from `metrics.jsonl`.

Environment variables of the trackers set the destination: `WANDB_MODE`, `MLFLOW_TRACKING_URI`.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.callbacks.step_log import Row, StepLog
from tfdist.config import TrainConfig
from tfdist.console.files import replacing
from tfdist.errors import MissingError, first_line
from tfdist.run.records import read_rows

if TYPE_CHECKING:
    from tfdist.run.folder import RunFolder

#: Loggers that need a package; the extra in setup.cfg has the same name.
TRACKERS = ("mlflow", "wandb")

#: How long the end of a run waits for the loggers, in seconds.
_SECONDS_AT_END = 30.0
_CSV_SECONDS = 10.0

#: The step of a row, and its kind. The rows of a run are in the order of their keys.
Key = tuple[int, int]
_LAST_KIND = 2


def check(names: Sequence[str]) -> None:
    """Checks before a training that the loggers are installed.

    Raises:
        MissingError: One is not installed.
    """
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise MissingError(f"--logger {name} needs {name}: pip install {name}.")


class FollowedLog(StepLog):
    """A `StepLog` that loggers follow. Checkpoints have the IDs of the loggers' runs."""

    def __init__(self, folder: RunFolder, config: TrainConfig, stats: Any) -> None:
        super().__init__(folder.metrics, stats, config.log_every)
        self._folder = folder
        self.followers = [
            Follower(name, _TRACKERS[name](config, folder), folder.path) for name in config.logger
        ]

    def send(self, row: Row) -> None:
        for follower in self.followers:
            follower.put(row)

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the rows, and the IDs of the loggers' runs."""
        ids = {follower.logger: follower.run_id for follower in self.followers}
        return super().get_state() | {"run": self._folder.name, "ids": ids}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the state of a checkpoint, unless its IDs are of another run folder."""
        super().set_state(state)
        for follower in self.followers if state["run"] == self._folder.name else ():
            follower.run_id = follower.run_id or state["ids"].get(follower.logger, "")

    def close(self) -> None:
        """Waits for the loggers, for a limited time."""
        deadline = time.monotonic() + _SECONDS_AT_END
        for follower in self.followers:
            follower.put(None)
        for follower in self.followers:
            follower.finish(deadline)


def _key(row: Row) -> Key:
    """Returns the place of a row: after a step may follow its validation, and the epoch's end."""
    is_validation = any(name.startswith("val_") for name in row)
    return row["step"], _LAST_KIND if "epoch" in row else int(is_validation)


class Follower(threading.Thread):
    """Gives rows to a logger, in the order of their steps, each once.

    Args:
        logger: Name of the logger.
        tracker: Has three methods, which run in this thread and may raise anything: `open(run_id)`
            continues the run with this ID, or begins one if it is empty, and returns its ID;
            `log(rows)` returns when it has received them; `close()` ends the run. If a logger can
            tell which row it got last, `last_key()` returns its key.
        folder: The run folder, with the rows before the first one.

    Attributes:
        run_id: ID of the logger's run; empty before it begins.
    """

    def __init__(self, logger: str, tracker: Any, folder: Path) -> None:
        super().__init__(name=f"logger-{logger}", daemon=True)
        self.logger, self._tracker, self._folder = logger, tracker, folder
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._note = folder / f"logger-{logger}.json"
        note = json.loads(self._note.read_text()) if self._note.exists() else {}
        self.run_id: str = note.get("id", "")
        step, kind = note.get("last", (-1, 0))
        self._last: Key = step, kind

    def put(self, row: Row | None) -> None:
        """Takes the next row; None ends the thread, which the first row starts."""
        if row is not None and self.ident is None:
            self.start()
        self._rows.put(row)

    def finish(self, deadline: float) -> None:
        """Waits until the rows are written, but not longer than until a time."""
        if self.ident is not None:
            self.join(max(0.0, deadline - time.monotonic()))
        if self.is_alive():
            self._warn(f"did not end within {_SECONDS_AT_END:.0f} s.")

    def run(self) -> None:
        try:
            first = self._rows.get()
            self.run_id = self._tracker.open(self.run_id)
            if hasattr(self._tracker, "last_key"):
                self._last = self._tracker.last_key()
            # Rows that were written before a kill but had not been sent.
            new = [row for row in read_rows(self._folder) if _key(row) < _key(first or row)]
            rows: list[Row | None] = [*new, first]
            while rows[-1] is not None:  # it is the last one
                self._send(rows)
                rows = [self._rows.get() for _ in range(max(1, self._rows.qsize()))]
            self._send(rows)
            self._tracker.close()
        except Exception as error:
            self._warn(f"failed: {first_line(error)} Training continues.")

    def _send(self, rows: Sequence[Row | None]) -> None:
        new = [row for row in rows if row is not None and _key(row) > self._last]
        if new:
            self._tracker.log(new)
            self._last = _key(new[-1])
            with replacing(self._note) as path:
                path.write_text(json.dumps({"id": self.run_id, "last": self._last}) + "\n")

    def _warn(self, what: str) -> None:
        line = f"warning: --logger {self.logger} {what} metrics.jsonl has all rows."
        print(line, file=sys.stderr, flush=True)


def _numbers(row: Row) -> dict[str, float]:
    """Returns what a row measures, without its place and what is not a number."""
    places = ("epoch", "step")
    return {k: v for k, v in row.items() if k not in places and isinstance(v, (int, float))}


class _TensorBoard:
    """Events of scalars. Rows of epochs have Keras's tags, and the epoch as their step."""

    def __init__(self, config: TrainConfig, folder: RunFolder) -> None:
        self._folder, self._files = folder.tensorboard, dict[str, Any]()

    def open(self, run_id: str) -> str:
        return run_id or self._folder.name

    def log(self, rows: Sequence[Row]) -> None:
        from tensorflow.compat.v1 import Event, Summary

        for row in rows:
            prefix, step = ("epoch_", row["epoch"] - 1) if "epoch" in row else ("", row["step"])
            for name, value in _numbers(row).items():
                part = "validation" if name.startswith("val_") else "train"
                tag = f"{prefix}{name.removeprefix('val_')}"
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                event = Event(wall_time=time.time(), step=step, summary=summary)
                self._file(part).write(event.SerializeToString())
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, part: str) -> Any:
        from tensorflow.compat.v1 import Event
        from tensorflow.io import TFRecordWriter

        if part not in self._files:
            path = self._folder / part / f"events.out.tfevents.{time.time():.0f}."
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._files[part] = TFRecordWriter(f"{path}{socket.gethostname()}")
            first = Event(wall_time=time.time(), file_version="brain.Event:2")
            file.write(first.SerializeToString())
        return self._files[part]


class _Csv:
    """`metrics.csv`, written anew from `metrics.jsonl`, because later rows have more columns."""

    def __init__(self, config: TrainConfig, folder: RunFolder) -> None:
        self._path = folder.path / "metrics.csv"
        self._written_at = time.monotonic()

    def open(self, run_id: str) -> str:
        return run_id or self._path.name

    def log(self, rows: Sequence[Row]) -> None:
        if time.monotonic() - self._written_at > _CSV_SECONDS:
            self.close()

    def close(self) -> None:
        rows = read_rows(self._path.parent)
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with replacing(self._path) as path, path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        self._written_at = time.monotonic()


class _MLflow:
    def __init__(self, config: TrainConfig, folder: RunFolder) -> None:
        self._config, self._name = config, folder.name

    def open(self, run_id: str) -> str:
        import mlflow

        run = mlflow.start_run(run_id=run_id or None, run_name=None if run_id else self._name)
        if not run_id:
            mlflow.log_params(self._config.model_dump(mode="json"))
        self._client, self._id = mlflow.MlflowClient(), str(run.info.run_id)
        return self._id

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1e3)
        for row in rows:  # of which each is written as a whole, or not at all
            values = _numbers(row).items()
            metrics = [
                Metric(f"epoch_{name}" if "epoch" in row else name, value, now, row["step"])
                for name, value in values
            ]
            self._client.log_batch(self._id, metrics=metrics, synchronous=True)

    def last_key(self) -> Key:
        def steps(metric: str) -> list[int]:  # every row has "seconds"
            return [one.step for one in self._client.get_metric_history(self._id, metric)]

        of_steps = steps("seconds")
        last = max(of_steps, default=-1)
        epoch = max(steps("epoch_seconds"), default=-1)
        return max((last, int(of_steps.count(last) > 1)), (epoch, _LAST_KIND))

    def close(self) -> None:
        import mlflow

        mlflow.end_run()


class _WandB:
    """Its client keeps rows in memory for seconds, which are lost if the process is killed."""

    def __init__(self, config: TrainConfig, folder: RunFolder) -> None:
        self._config, self._folder = config, folder

    def last_key(self) -> Key:
        """Returns the last row that has arrived: at the server, or in the files without one."""
        if not self._run.offline:
            return int(self._run.starting_step) - 1, _LAST_KIND
        files = self._folder.path.glob(f"wandb/*-{self._run.id}/*.wandb")
        steps = (step for file in files for step in steps_in_wandb_file(file))
        return max(steps, default=-1), _LAST_KIND

    def open(self, run_id: str) -> str:
        import wandb

        options: dict[str, Any] = {"id": run_id, "resume": "allow"} if run_id else {}
        config = self._config.model_dump(mode="json")
        self._run = wandb.init(
            name=self._folder.name, dir=str(self._folder.path), config=config, **options
        )
        return str(self._run.id)

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = {
                f"epoch_{name}" if "epoch" in row else name: value
                for name, value in _numbers(row).items()
            }
            epoch = {"epoch": row["epoch"]} if "epoch" in row else {}
            self._run.log(values | epoch, step=row["step"])

    def close(self) -> None:
        self._run.finish()


def steps_in_wandb_file(file: Path) -> Iterator[int]:
    """Yields the step of each row in a file of W&B: LevelDB's log format, after a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, begin, parts = file.read_bytes(), 7, b""
    while begin + 7 <= len(data):
        if 32768 - begin % 32768 < 7:  # the end of a block is filled with zeros
            begin += 32768 - begin % 32768
            continue
        length, kind = struct.unpack("<HB", data[begin + 4 : begin + 7])
        begin += 7 + length
        if begin > len(data):  # the process was killed while it wrote
            break
        parts += data[begin - length : begin]
        if kind in (1, 4):  # a full record, or the last part of one
            history = Record.FromString(parts).history
            parts = b""
            if history.item:
                yield history.step.num


_TRACKERS: dict[str, Callable[[TrainConfig, RunFolder], Any]] = {
    "tensorboard": _TensorBoard,
    "csv": _Csv,
    "mlflow": _MLflow,
    "wandb": _WandB,
}
