"""The ledger of a run, over restarts, from what its processes have written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT, starting
from tfdist.callbacks import ledger as ledger_log
from tfdist.callbacks.ledger import LedgerLog
from tfdist.cluster.networks import free_ports
from tfdist.run.records import Ledger, read_ledger, read_rows
from tfdist.tools.runs import __main__ as runs


class Clock:
    """Time of which a test decides how it passes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def process(folder: Path, clock: Clock, state: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    """Runs a process of the run for a number of steps of 2 s, the first of which takes 5 s.

    It starts for 10 s, 4 of which it waits for another process. After its second step it saves a
    checkpoint, within 1 s. Returns the state in it.
    """
    call = SimpleNamespace(
        seconds=5.0, result=SimpleNamespace(num_steps=1, seconds_waited=0.5, num_rows=1)
    )
    log = LedgerLog(folder / "ledger.json", SimpleNamespace(last_call=call), waited=4.0)
    clock.now += 10
    log.on_train_begin()
    if state is not None:
        log.set_state(state)
    saved: dict[str, Any] = {}
    for step in range(steps):
        log.on_train_batch_begin(step)
        clock.now += call.seconds
        log.on_train_batch_end(step)
        call.seconds = 2.0
        if step == 1:
            clock.now += 1
            saved = log.get_state()
    log.on_train_batch_begin(steps)
    log._write()
    return saved


def test_each_second_is_booked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(time, "perf_counter", clock)
    began = SimpleNamespace(create_time=clock)
    monkeypatch.setattr(ledger_log, "psutil", SimpleNamespace(Process=lambda: began))
    state = process(tmp_path, clock, None, 5)  # killed after the fifth step
    clock.now += 100  # until somebody starts it again
    process(tmp_path, clock, state, 3)
    ledger = read_ledger(tmp_path)
    assert ledger is not None
    assert ledger.wall == pytest.approx(clock.now - 1000)
    assert ledger.seconds == pytest.approx(
        {
            "start": 12, "nodes": 8, "compile": 10, "data": 1.5, "compute": 4.5, "evaluation": 0,
            "checkpoints": 1, "results": 0, "other": 1, "lost": 6, "down": 100,
        }
    )  # fmt: skip
    assert (ledger.steps, ledger.failures, ledger.saves) == (5, 1, 2)


def test_proposed_interval_is_that_of_young_for_short_saves() -> None:
    ledger = Ledger({"compute": 7200.0}, failures=2, saves=10, save_seconds=20.0)
    assert ledger.checkpoint_interval() == pytest.approx((2 * 2.0 * 3600) ** 0.5, rel=0.05)
    assert Ledger({"compute": 7200.0}).checkpoint_interval() is None


def test_commands_show_time_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": i, "loss": 1 / i, "seconds": 0.1} for i in range(1, 9)]
    rows.append({"epoch": 1, "step": 8, "loss": 0.2, "val_loss": 0.3, "seconds": 1})
    seconds = {"start": 3.0, "compute": 5.0}
    attempt = {"began": 0.0, "at": 8.0, "step": 8, "saves": 0, "ended": True}
    attempt["seconds"] = seconds | {"checkpoints": 0.0}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("recipe: <b>digits</b>")
        lines = "\n".join(json.dumps(row) for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
        (tmp_path / name / "ledger.json").write_text(json.dumps([attempt]))
        seconds["start"] = attempt["seconds"]["start"] = 9.0
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert runs.main(["show", a, "--price", "3600"]) == 0
    shown = capsys.readouterr().out
    assert "goodput 62.5%" in shown
    assert runs.main(["page", a]) == 0
    page = (tmp_path / "a" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert "&lt;b&gt;digits" in page
    assert runs.main(["compare", a, b, "--picture", str(tmp_path / "curves.png")]) == 0
    assert "B takes 750.00 ms more per step than A, most of it for start" in " ".join(
        capsys.readouterr().out.split()
    )
    (tmp_path / "a" / "ledger.json").unlink()
    assert runs.main(["show", a]) == 1
    assert "has no ledger.json" in capsys.readouterr().err


@pytest.mark.long
def test_kill_and_a_late_worker_are_booked(tmp_path: Path) -> None:
    """Steps that take known times, one SIGKILL at a known step, and a worker that comes late."""
    starting.write_slow_recipe(tmp_path / "pauses.py", 0.3)
    command = [
        sys.executable, "-m", "tfdist.train", "--recipe=./pauses.py", "--verbose=0", "--epochs=4",
        "--strategy=multi_worker", "--checkpoint-every=20", "--run-dir=run", "--resume=auto",
        "--log-every=1",
    ]  # fmt: skip
    began = time.time()

    def start(lateness: float) -> list[subprocess.Popen[bytes]]:
        addresses = [f"localhost:{port}" for port in free_ports(2)]
        workers = []
        for rank in range(2):
            where = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            environment = os.environ | {"PYTHONPATH": str(ROOT), "TF_CONFIG": json.dumps(where)}
            workers.append(subprocess.Popen(command, cwd=tmp_path, env=environment))
            time.sleep(lateness if rank == 0 else 0)
        return workers

    run = tmp_path / "run"
    workers = start(lateness=15)
    while sum("epoch" not in row for row in read_rows(run)) < 33:
        assert workers[0].poll() is None
        time.sleep(0.05)
    for worker in workers:
        worker.kill()
        worker.wait(30)
    time.sleep(10)
    workers = start(lateness=0)
    for worker in workers:
        assert worker.wait(200) == 0
    ended = time.time()
    ledger = read_ledger(run)
    assert ledger is not None
    # Only the exits of the interpreters, which a busy machine slows down, are booked nowhere.
    assert ledger.wall == pytest.approx(ended - began, rel=0.01, abs=2)
    assert ledger.failures == 1
    # The late worker starts as fast as the other one did, or not quite on a busy machine.
    assert ledger.seconds["nodes"] == pytest.approx(15, abs=6)
    assert ledger.seconds["lost"] == pytest.approx(13 * 0.3, abs=2.5)
    assert 10 <= ledger.seconds["down"] < 13
    assert ledger.steps == 64
    assert 64 * 0.3 < ledger.seconds["other"] < 64 * 0.3 + 4
