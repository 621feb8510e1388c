"""The batch-size search, its trials in subprocesses, and the range test on the digits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tfdist.tools.tune import __main__ as tune
from tfdist.tools.tune import batch_size
from tfdist.tools.tune.batch_size import Outcome


@pytest.mark.parametrize(
    ("capacity", "most"), [(0, 64), (8, 64), (9, 64), (1000, 4096), (5000, 4096)]
)
def test_finds_the_largest_batch_in_few_trials(capacity: int, most: int) -> None:
    tried = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= capacity

    result = batch_size.largest(fits, 8, most)
    assert result <= min(capacity, most)
    if capacity >= 8:
        assert result >= 0.95 * min(capacity, most) - 1
    assert len(tried) == len(set(tried)) <= 16


def test_recommended_batch_is_a_tenth_smaller() -> None:
    assert [batch_size.recommended(n) for n in (1, 8, 9, 100, 1000)] == [1, 7, 8, 88, 896]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("", (True, False)),
        ("import sys; sys.exit('error: out of memory: no')", (False, True)),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", (False, True)),
        ("import sys; sys.exit('error: no such recipe')", (False, False)),
        ("import time; time.sleep(600)", (False, False)),
    ],
)
def test_outcome_of_a_trial_is_classified(
    program: str, expected: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    (tmp_path / "program.py").write_text(program)
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -S {tmp_path / 'program.py'}\n")
    script.chmod(0o755)
    monkeypatch.setattr(batch_size.sys, "executable", str(script))
    seconds = 1 if "sleep" in program else 60
    outcome = batch_size.try_batch(8, [], None, 1, seconds)
    assert (outcome.fits, outcome.out_of_memory) == expected


def test_command_recommends_a_batch_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: list[tuple[object, ...]] = []

    def tried(batch: int, *rest: object) -> Outcome:
        arguments.append(rest)
        return Outcome(batch <= 100, batch > 100, "")

    monkeypatch.setattr(batch_size, "try_batch", tried)
    assert tune.main(["batch-size", "--memory", "500", "--", "--recipe", "digits"]) == 0
    assert "--batch-size 8" in capsys.readouterr().out
    assert arguments[0] == (["--recipe", "digits"], 500, 3, 600)
    monkeypatch.setattr(batch_size, "try_batch", lambda *_: Outcome(False, False, "no such recipe"))
    assert tune.main(["batch-size"]) == 1
    assert "training with a batch of 8 fails: no such recipe" in capsys.readouterr().err


def test_range_test_writes_table_and_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, chart = tmp_path / "lr.csv", tmp_path / "lr.png"
    line = ["lr", "--steps", "30", "--from", "1e-4", "--table", str(table), "--chart", str(chart)]
    training = ["--recipe", "digits", "--model", "mlp", "--data-dir", str(tmp_path / "data")]
    assert tune.main([*line, "--", *training]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "--learning-rate" in out
    header, *rows = table.read_text().splitlines()
    assert header == "learning rate,loss,smoothed"
    assert rows[0].startswith("0.0001,2.")
    assert 5 < len(rows) <= 30
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert tune.main(["lr", "--from", "1", "--to", "0.1"]) == 1


@pytest.mark.long
def test_finds_the_batch_size_of_digits_under_a_memory_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = ["--data-dir", str(tmp_path), "--recipe", "digits"]
    line = ["batch-size", "--memory", "24", "--from", "64", "--", *training]
    assert tune.main(line) == 0
    out = capsys.readouterr().out
    assert "out of memory" in out
    assert "--batch-size" in out
