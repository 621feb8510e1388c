"""Benchmarks over several processes, and the command that runs all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.__main__
import tfdist.tools.bench.__main__
from benchmarks.scaling import ENGINES
from tests.tools.bench.test_step import run
from tfdist.tools.bench import scaling
from tfdist.tools.bench.__main__ import main


class Fixed:
    """A pool whose workers report given times."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.num_workers = 1 if "one process" in engine else 2

    def ask(self, model: str, way: str, num_steps: int) -> list[float]:
        times = {"one process": 100.0, "two apart": 110.0, "PyTorch, one process": 80.0,
                 "PyTorch, two apart": 80.0, "PyTorch, Gloo": 100.0}  # fmt: skip
        own = times.get(self.engine, 125.0 if way == "tfdist" else 120.0)
        return [own] * self.num_workers


def test_scaling_numbers_follow_from_the_times() -> None:
    pools = {name: Fixed(name) for name in ENGINES if name != "Horovod, MPI"}
    workload = scaling.MODELS["cnn"]
    result = scaling.measure("cnn", workload, pools, 2, ENGINES)  # type: ignore[arg-type]
    rows = {(row["engine"], row["way"]): row for row in result["rows"]}
    ours = rows["multi_worker", "tfdist"]
    assert ours["images_per_s"]["median"] == pytest.approx(2 * 64 / 0.125)
    assert ours["efficiency"]["median"] == pytest.approx(0.8)
    assert ours["exchange"]["median"] == pytest.approx(1 - 110 / 125)
    assert ours["to_by_hand"]["median"] == pytest.approx(125 / 120)
    assert ours["to_by_hand"]["met"] is True
    assert ours["efficiency"]["met"] is True  # PyTorch's is 0.8, too
    assert "efficiency" not in rows["one process", "tfdist"]


@pytest.mark.processes
def test_allreduce_smoke(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--chart", str(tmp_path / "a.png")]
    assert main(["allreduce", "--smoke", "--engines", "mirrored", "multi_worker", *files]) == 0
    document = json.loads((tmp_path / "a.json").read_text())
    assert [result["bytes"] for result in document["results"]] == [1000, 100_000]
    for result in document["results"]:
        assert list(result["engines"]) == ["mirrored", "multi_worker", "memory copy"]
        assert all(own["gb_per_s"]["median"] > 0 for own in result["engines"].values())
    assert (tmp_path / "a.png").stat().st_size > 0


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
