"""Steps over a slow link: ratios computed by hand, and the study as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.link import ENGINES, judge
from benchmarks.link_protocol import Times
from tests.tools.bench.test_step import run


def test_step_is_compared_with_the_longer_of_its_parts() -> None:
    times = {"compute": 100.0, "send": 200.0, "at once": 300.0, "in buckets": 250.0}
    taken = {name: [Times(ms, 150.0)] for name, ms in times.items()}
    found = judge({"bytes": 8, "buckets": 4, "last_bucket": 0.25}, taken)
    assert found["steps"]["at once"]["to_sum"]["median"] == pytest.approx(1.0)
    ratios = found["steps"]["in buckets"]
    assert ratios["to_longer"]["median"] == pytest.approx(1.0)
    assert ratios["to_longer"]["met"] is True
    assert ratios["to_core"]["median"] == pytest.approx(250 / (100 + 150 + 50))
    assert ratios["to_at_once"]["median"] == pytest.approx(250 / 300)


@pytest.mark.long
@pytest.mark.processes
def test_link_smoke(tmp_path: Path) -> None:
    links = ["2gbit", "1gbit"]
    flags = ["--smoke", "--links", *links, "--json", "a.json"]
    run(tmp_path, "link", *flags, program="benchmarks")
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    assert {result["link"] for result in results} == set(links)
    for result in results:
        ways = ENGINES[result["engine"]].ways
        assert list(result["ms"]) == ["compute", "send", *ways]
        assert result["buckets"] > 4
