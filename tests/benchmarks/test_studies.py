"""Studies as a user runs them: that they run and what they write, not how fast."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

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


@pytest.mark.long
def test_smoke_measures_strategies(tmp_path: Path) -> None:
    files = ["--json", "a.json", "--table", "a.csv", "--chart", "a.png"]
    run(tmp_path, "strategies", "--smoke", *files, program="benchmarks")
    header, *rows = csv.reader((tmp_path / "a.csv").read_text().splitlines())
    assert "efficiency" in header
    assert len(rows) >= 2
    assert json.loads((tmp_path / "a.json").read_text())["benchmark"] == "strategies"
    assert (tmp_path / "a.png").stat().st_size > 0


def test_wrong_file_is_found_before_measuring(tmp_path: Path) -> None:
    done = run(tmp_path, "strategies", "--table", "a.txt", program="benchmarks", code=1)
    assert "a.txt: expected a name that ends with .md or .csv" in done.stderr
