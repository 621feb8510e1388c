"""A short run of `python -m tests.studies.faults`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.studies.faults import kills, signals
from tests.support.starting import python


def faults(tmp_path: Path, *flags: str) -> list[dict[str, Any]]:
    results = tmp_path / "results"
    python("-m", "tests.studies.faults", *flags, "--results", str(results), timeout=540)
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_killed_training_matches_uninterrupted_training(tmp_path: Path) -> None:
    flags = ["saves", "kills", "--strategy", "one_device", "--runs", "1"]
    killed, saved = faults(tmp_path, *flags, "--kills-of-a-run", "3", "--kills-of-saves", "8")
    assert killed["kills"]
    assert saved["kills"] == saved["whole"] == 8
    assert saved["older"] == saved["left over"] == 0


def test_second_signal_leaves_the_save_alone() -> None:
    result = signals.run(signals.Cell("SIGTERM twice", "saving", "shell"))
    assert not result["wrong"], result["log"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", list(kills.STRATEGIES)[1:])
def test_killed_training_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    flags = ["kills", "--strategy", strategy, "--runs", "1", "--kills-of-a-run", "3"]
    (killed,) = faults(tmp_path, *flags)
    assert killed["kills"]
