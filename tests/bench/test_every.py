"""All benchmarks by one command: that each runs and what it writes, never how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.test_step import run
from tfdist.bench.__main__ import COMMANDS


def test_unknown_benchmark_is_found_at_once(tmp_path: Path) -> None:
    done = run(tmp_path, "all", "--only", "sweep", "swep")
    assert done.returncode == 1
    assert "--only swep: expected some of allreduce, " in done.stderr


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"all"}))
def test_smoke_writes_the_results_of_every_benchmark(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, "all", "--smoke", "--only", name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "bench" / f"{name}.json").read_text())["benchmark"] == name
