"""A short run of `python -m tests.faults`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import kills
from tests.support import ROOT


def faults(tmp_path: Path, *flags: str) -> list[dict[str, Any]]:
    results = tmp_path / "results"
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", *flags, "--results", str(results)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_killed_training_matches_uninterrupted_training(tmp_path: Path) -> None:
    flags = ["saves", "kills", "--strategy", "one_device", "--runs", "1"]
    killed, saved = faults(tmp_path, *flags, "--kills-of-a-run", "3", "--kills-of-saves", "8")
    assert killed["kills"]
    assert saved["kills"] == saved["whole"] == 8
    assert saved["older"] == saved["left over"] == 0


@pytest.mark.long
@pytest.mark.parametrize("strategy", list(kills.STRATEGIES)[1:])
def test_killed_training_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    flags = ["kills", "--strategy", strategy, "--runs", "1", "--kills-of-a-run", "3"]
    (killed,) = faults(tmp_path, *flags)
    assert killed["kills"]
