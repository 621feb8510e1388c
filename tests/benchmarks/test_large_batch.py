"""The large-batch study as a user runs it: that it runs and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.large_batch import Plan
from tests.tools.bench.test_step import run


def test_plans_set_the_learning_rate() -> None:
    plan = Plan(reference_batch=32, learning_rate=0.05, epochs=30, data_dir="data")
    config = plan.config("linear-warmup", 1024, 0)
    assert (config.lr_scaling, config.warmup_epochs, config.warmup_start) == ("linear", 5, 0.05)
    assert config.lr_decay_epochs == pytest.approx([10, 20, 80 / 3])
    assert plan.config("fixed", 1024, 0).lr_scaling == "none"


def test_smoke_writes_table_and_chart(tmp_path: Path) -> None:
    run(
        tmp_path, "large_batch", "--smoke", "--ways", "fixed", "linear-warmup",
        "--data-dir", "data", "--json", "a.json", "--table", "a.md", "--chart", "a.png",
        program="benchmarks",
    )  # fmt: skip
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    found = [
        (own["way"], own["batch_size"], pytest.approx(own["learning_rate"])) for own in results
    ]
    assert found == [
        ("fixed", 32, 0.02), ("fixed", 512, 0.02),
        ("linear-warmup", 32, 0.02), ("linear-warmup", 512, 0.32),
    ]  # fmt: skip
    assert [own["steps"] for own in results] == [90, 6, 90, 6]
    assert (tmp_path / "a.md").read_text().startswith("| batch | fixed | linear-warmup |")
    assert (tmp_path / "a.png").stat().st_size > 0
