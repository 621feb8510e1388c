"""The command that runs all benchmarks: that each runs and writes results, not its speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.__main__
import tfdist.tools.bench.__main__
from tests.tools.bench.test_step import run

NAMES = [
    (program, name)
    for program, commands in (
        ("tfdist.tools.bench", tfdist.tools.bench.__main__.COMMANDS),
        ("benchmarks", benchmarks.__main__.COMMANDS),
    )
    for name in sorted(set(commands) - {"all", "compare"})
]


def test_unknown_benchmark_raises_immediately(tmp_path: Path) -> None:
    done = run(tmp_path, "all", "--only", "step", "stap", code=1)
    assert "--only stap: expected one or more of allreduce, " in done.stderr


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("program", "name"), NAMES)
def test_smoke_writes_the_results(program: str, name: str, tmp_path: Path) -> None:
    run(tmp_path, "all", "--smoke", "--only", name, program=program)
    document = json.loads((tmp_path / "bench" / f"{name}.json").read_text())
    assert document["benchmark"] == name
