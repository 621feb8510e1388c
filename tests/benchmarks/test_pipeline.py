"""The pipeline study as a user runs it: that it runs and what it writes, not how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.remote_pipeline import planned_seconds
from tests.tools.bench.test_step import run


@pytest.mark.long
def test_smoke_measures_a_pipeline(tmp_path: Path) -> None:
    done = run(tmp_path, "pipeline", "--smoke", "--json", "pipeline.json", program="benchmarks")
    assert "of the ideal" in done.stdout
    assert "Full-batch mode" not in done.stderr
    (result,) = json.loads((tmp_path / "pipeline.json").read_text())["results"]
    assert (result["stages"], result["order"], result["micro_batches"]) == (2, "1f1b", 2)
    assert result["ideal"] == pytest.approx(4 / 3)
    assert result["speed_up"]["median"] > 0


@pytest.mark.long
def test_unknown_order_raises(tmp_path: Path) -> None:
    done = run(tmp_path, "pipeline", "--orders", "2f2b", program="benchmarks", code=1)
    assert "1f1b" in done.stderr


def test_step_over_a_link_is_planned() -> None:
    # Without a link: the bubble of two stages.
    assert planned_seconds(4, 1.0, 0.0) == pytest.approx(3 * (4 + 1))
    # A fast link delays the first activations and the last gradients.
    assert planned_seconds(4, 1.0, 0.5) == pytest.approx(3 * (4 + 1) + 2 * 0.5)
    # A slow link sends one tensor after the other, between a turn at each end.
    assert planned_seconds(4, 1.0, 10.0) == pytest.approx(3 * 2 + 2 * 4 * 10.0)


@pytest.mark.long
@pytest.mark.processes
def test_smoke_measures_a_pipeline_over_a_link(tmp_path: Path) -> None:
    run(tmp_path, "remote_pipeline", "--smoke", "--json", "a.json", program="benchmarks")
    (result,) = json.loads((tmp_path / "a.json").read_text())["results"]
    assert result["seconds"] > 0
    assert min(result["tx_bytes"], result["rx_bytes"]) > result["planned_bytes"]
