"""Loggers follow the rows of a run, each row once, also after kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, starting
from tfdist.config import TrainConfig
from tfdist.run import loggers
from tfdist.run.folder import RunFolder
from tfdist.run.records import read_rows


class Tracker:
    """Records what it gets; fails or waits on request."""

    def __init__(self, calls: list[Any], fails: bool = False, seconds: float = 0.0) -> None:
        self.calls, self.fails, self.seconds = calls, fails, seconds

    def open(self, run_id: str) -> str:
        if self.fails:
            raise ConnectionError("no route to host\nand more")
        self.calls.append(f"open {run_id}")
        return "id-1"

    def log(self, rows: Sequence[dict[str, Any]]) -> None:
        time.sleep(self.seconds)
        self.calls.extend(loggers._key(row) for row in rows)

    def close(self) -> None:
        self.calls.append("close")


def follow(folder: Path, tracker: Tracker, steps: Sequence[int], ends: bool = True) -> None:
    """Writes and sends the rows of steps, the last of which may not be sent before a kill."""
    follower = loggers.Follower("wandb", tracker, folder)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
            file.flush()
            if ends or step != steps[-1]:
                follower.put({"step": step, "loss": 1.0})
    follower.put(None)
    follower.finish(time.monotonic() + 20)


def test_resumed_run_sends_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    calls: list[Any] = []
    follow(tmp_path, Tracker(calls), [1, 2, 3], ends=False)  # 3 was written, not sent
    assert calls == ["open ", (1, 0), (2, 0), "close"]
    calls.clear()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')  # cut to a checkpoint
    follow(tmp_path, Tracker(calls), [2, 3, 4])
    assert calls == ["open id-1", (3, 0), (4, 0), "close"]
    note = json.loads((tmp_path / "logger-wandb.json").read_text())
    assert note == {"id": "id-1", "last": [4, 0]}


def test_failing_logger_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    follow(tmp_path, Tracker([], fails=True), [1, 2, 3])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: --logger wandb failed: no route to host")
    assert len(read_rows(tmp_path)) == 3
    calls: list[Any] = []
    follow(tmp_path, Tracker(calls), [4])  # works again: gets all rows
    assert calls[1:-1] == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_slow_logger_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker([], seconds=5.0)
    monkeypatch.setitem(loggers._TRACKERS, "csv", lambda config, folder: tracker)
    monkeypatch.setattr(loggers, "_SECONDS_AT_END", 0.1)
    log = loggers.FollowedLog(RunFolder(tmp_path), TrainConfig(logger="csv"), None)
    began = time.monotonic()
    log.send({"step": 1})
    log.close()
    assert time.monotonic() - began < 3.0
    assert "--logger csv did not end within 0 s" in capsys.readouterr().err


def test_checkpoint_has_the_ids_of_its_run_only(tmp_path: Path) -> None:
    config = TrainConfig(logger="csv")
    first = loggers.FollowedLog(RunFolder(tmp_path / "a"), config, None)
    first.followers[0].run_id = "id-1"
    state = first.get_state()
    for name, expected in (("a", "id-1"), ("b", "")):
        log = loggers.FollowedLog(RunFolder(tmp_path / name), config, None)
        log.set_state(state)
        assert log.get_state()["ids"] == {"csv": expected}


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_killed_run_has_each_step_once(num_kills: int, tmp_path: Path) -> None:
    """With the real clients, offline: MLflow in a database, W&B in files, TensorBoard's events."""
    names = [name for name in ("mlflow", "wandb") if loggers.importlib.util.find_spec(name)]
    if not names:
        pytest.skip("needs mlflow or wandb")
    run, rng = tmp_path / "run", random.Random(0)
    epochs = 10 + 10 * num_kills
    # So slow that the loggers, whose packages take seconds to import, can follow.
    starting.write_slow_recipe(tmp_path / "slow.py", 0.05)
    flags = [
        "--recipe=./slow.py", "--strategy=one_device", "--verbose=0", "--log-every=1",
        f"--epochs={epochs}", "--checkpoint-every=7", f"--run-dir={run}", "--resume=auto",
        f"--logger={','.join(['tensorboard', *names])}",
    ]  # fmt: skip
    database = f"sqlite:///{tmp_path}/mlflow.db"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": database,
    }  # fmt: skip
    command = [sys.executable, "-m", "tfdist.train", *flags]

    def note(name: str) -> dict[str, Any]:
        path = run / f"logger-{name}.json"
        return json.loads(path.read_text()) if path.exists() else {"last": [0]}

    def last_sent() -> int:
        """Returns the last step that the slowest logger has got."""
        return min(note(name)["last"][0] for name in names)

    for _ in range(num_kills):
        process = subprocess.Popen(command, cwd=tmp_path, env=environment)
        target = last_sent() + rng.randint(1, 15)
        while process.poll() is None and last_sent() < target:
            time.sleep(0.02 + rng.random() / 50)
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait(60)
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)

    rows = read_rows(run)
    steps = [row["step"] for row in rows if "epoch" not in row]
    assert steps == list(range(1, max(steps) + 1))
    assert [row["epoch"] for row in rows if "epoch" in row] == list(range(1, epochs + 1))
    # A row that was sent but not noted before a kill is sent twice, with the same values.
    assert sorted(set(_steps_of_tensorboard(run / "tensorboard" / "train"))) == steps
    if "mlflow" in names:
        import mlflow

        client = mlflow.MlflowClient(database)
        (only,) = client.search_runs(["0"])
        assert only.info.run_id == note("mlflow")["id"]
        history = client.get_metric_history(only.info.run_id, "step_loss")
        assert sorted(metric.step for metric in history) == steps
    if "wandb" in names:
        folders = list((run / "wandb").glob("offline-run-*"))
        assert {folder.name.rpartition("-")[2] for folder in folders} == {note("wandb")["id"]}
        files = [file for folder in folders for file in folder.glob("run-*.wandb")]
        counted = Counter(n for file in files for n in loggers.steps_in_wandb_file(file))
        assert counted == Counter(steps)


def _steps_of_tensorboard(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    return [event.step for event in events.Scalars("step_loss")]
