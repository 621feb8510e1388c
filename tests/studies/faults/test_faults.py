"""Short runs of the studies of killed trainings and of writers to a bucket."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.studies.faults import kills, signals
from tests.support import buckets, starting
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


def output_of_module(module: str, *flags: str) -> str:
    buckets.require_s3()
    return starting.run(sys.executable, "-m", f"tests.studies.{module}", *flags).stdout


@pytest.mark.long
def test_kills_and_every_fault() -> None:
    output = output_of_module("bucket_faults", "--kills=3", "--saves=2")
    assert "kills 3, whole 3, one save old 0, older 0" in output
    # How many of the saves fail depends on the machine's load: retries stop after 20 s.
    row = r"\| server unreachable for 3 s \| \d of 2.* \| intact \| each record once, in order \|"
    assert re.search(row, output), output


def test_kills_of_a_rank_that_writes_its_shards() -> None:
    output = output_of_module("joint_kills", "--kills=3")
    for place in ("folder", "bucket"):
        row = rf"{place}: kills 3, intact 3, damaged 0, in parts \d, left over \d"
        assert re.search(row, output), output
