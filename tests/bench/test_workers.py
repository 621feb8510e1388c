"""Benchmarks over several processes: that they run and what they write, never how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.test_step import run
from tfdist.bench.scaling import measure, over_link
from tfdist.bench.scaling.engines import ENGINES
from tfdist.bench.scaling.link_answers import Taken
from tfdist.bench.scaling.link_ratios import judged


class Fixed:
    """A pool whose workers take a known time."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.num_workers = 1 if "one process" in engine else 2

    def ask(self, model: str, way: str, num_steps: int) -> list[float]:
        times = {"one process": 100.0, "two apart": 110.0, "PyTorch, one process": 80.0,
                 "PyTorch, two apart": 80.0, "PyTorch, Gloo": 100.0}  # fmt: skip
        own = times.get(self.engine, 125.0 if way == "tfdist" else 120.0)
        return [own] * self.num_workers


def test_scaling_numbers_follow_from_the_times() -> None:
    from tfdist.bench.step.workloads import WORKLOADS

    pools = {name: Fixed(name) for name in ENGINES if name != "Horovod, MPI"}
    result = measure.model("cnn", WORKLOADS["cnn"], pools, 2)  # type: ignore[arg-type]
    rows = {(row["engine"], row["way"]): row for row in result["rows"]}
    ours = rows["multi_worker", "tfdist"]
    assert ours["images_per_s"]["median"] == pytest.approx(2 * 64 / 0.125)
    assert ours["efficiency"]["median"] == pytest.approx(0.8)
    assert ours["exchange"]["median"] == pytest.approx(1 - 110 / 125)
    assert ours["to_by_hand"]["median"] == pytest.approx(125 / 120)
    assert ours["to_by_hand"]["met"] is True
    assert ours["efficiency"]["met"] is True  # PyTorch's is 0.8 too
    assert "efficiency" not in rows["one process", "tfdist"]


def test_a_step_over_a_link_is_judged_by_the_longer_of_its_parts() -> None:
    times = {"compute": 100.0, "send": 200.0, "at once": 300.0, "in buckets": 250.0}
    taken = {name: [Taken(ms, 150.0)] for name, ms in times.items()}
    found = judged({"bytes": 8, "buckets": 4, "last_bucket": 0.25}, taken)
    assert found["steps"]["at once"]["to_sum"]["median"] == pytest.approx(1.0)
    ratios = found["steps"]["in buckets"]
    assert ratios["to_longer"]["median"] == pytest.approx(1.0)
    assert ratios["to_longer"]["met"] is True
    assert ratios["to_core"]["median"] == pytest.approx(250 / (100 + 150 + 50))
    assert ratios["to_at_once"]["median"] == pytest.approx(250 / 300)


@pytest.mark.long
@pytest.mark.processes
def test_scaling_over_a_link_smoke(tmp_path: Path) -> None:
    links = ["--link", "2gbit", "1gbit"]
    done = run(tmp_path, "scaling", "--smoke", *links, "--json", "a.json")
    if "does not let us make two hosts" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    assert {result["link"] for result in results} == set(links[1:])
    for result in results:
        ways = over_link.ENGINES[result["engine"]].ways
        assert list(result["ms"]) == ["compute", "send", *ways]
        assert result["buckets"] > 4


@pytest.mark.processes
def test_allreduce_smoke(tmp_path: Path) -> None:
    done = run(
        tmp_path, "allreduce", "--smoke", "--engines", "mirrored", "multi_worker",
        "--json", "a.json", "--chart", "a.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "a.json").read_text())
    assert [result["bytes"] for result in document["results"]] == [1000, 100_000]
    for result in document["results"]:
        assert list(result["engines"]) == ["mirrored", "multi_worker", "memory copy"]
        assert all(own["gb_per_s"]["median"] > 0 for own in result["engines"].values())
    assert (tmp_path / "a.png").stat().st_size > 0
