"""The pipeline study as a user runs it: that it runs and what it writes, not how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.test_step import run


@pytest.mark.long
def test_smoke_measures_a_pipeline(tmp_path: Path) -> None:
    done = run(tmp_path, "pipeline", "--smoke", "--json", "pipeline.json", program="benchmarks")
    assert "of the ideal" in done.stdout
    (result,) = json.loads((tmp_path / "pipeline.json").read_text())["results"]
    assert (result["stages"], result["order"], result["micro_batches"]) == (2, "1f1b", 2)
    assert result["ideal"] == pytest.approx(4 / 3)
    assert result["speed_up"]["median"] > 0


@pytest.mark.long
def test_unknown_order_raises(tmp_path: Path) -> None:
    done = run(tmp_path, "pipeline", "--orders", "2f2b", program="benchmarks", code=1)
    assert "1f1b" in done.stderr
