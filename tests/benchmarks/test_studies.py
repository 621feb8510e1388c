"""Studies as a user runs them: that they run and what they write, not how fast."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks import compare, memory, memory_limit
from tests.support import ROOT
from tests.support.commands import needs_horovod
from tests.support.training import TOLERANCE
from tests.tools.bench.test_step import run
from tfdist.errors import ConfigurationError


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


def test_expected_bytes_are_those_of_zero() -> None:
    per_weight = {name: memory.expected(name, 1, 4) for name in memory.CONTENDERS}
    rest = [own["expected_rest"] for own in per_weight.values()]
    assert rest == [48, 48, 12, 12, 28, 28, 12, 28, 48, 28, 28, 12]
    sent = [own["expected_sent"] for own in per_weight.values()]
    assert sent == [0, 0, 0, 0, 0, 0, 0, 0, 6, 9, 6, 9]
    alone = memory.expected("one_device", 1, 1)
    assert (alone["expected_rest"], alone["expected_step"]) == (12, 16)


@pytest.mark.long
@pytest.mark.parametrize(
    "contender",
    ["sharded parameters", pytest.param("sharded parameters, processes", marks=needs_horovod)],
)
def test_shards_are_counted_on_their_devices(contender: str) -> None:
    measured = memory.measure(contender, 131_072, 2, 2)
    scalars = 8 + 4  # the count of steps and the learning rate
    assert measured["largest"] == measured["expected_rest"] // 2 + scalars
    assert measured["rest"] >= measured["expected_rest"]
    # The backward pass needs no weights of the first layer, and still has those of the last.
    wanted = measured["expected_sent"] * 2 / 3
    assert wanted <= measured["sent"] <= wanted + 100


@pytest.mark.long
@pytest.mark.processes
@needs_horovod
def test_network_that_does_not_fit_trains_sharded() -> None:
    # 2.6 million weights: 30 MB of them and of Adam's moments, and 10 more of gradients.
    free, whole, sharded = memory_limit.compare(2_600_000, 10, 2, 30)
    assert not free["error"]
    assert whole["error"].startswith("out of memory: ")
    assert "--strategy sharded" in whole["error"]
    assert not sharded["error"]
    assert sharded["difference"] < TOLERANCE
    np.testing.assert_allclose(sharded["loss"], free["loss"], rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ([0.80, 0.82, 0.78, 0.81], "faster"),
        ([1.20, 1.25, 1.22, 1.18], "slower"),
        ([0.80, 1.30, 0.90, 1.20], "equal"),  # the interval contains 1
        ([0.995, 0.996, 0.994, 0.995], "equal"),  # certain, but negligible
    ],
)
def test_verdict_follows_from_the_confidence_interval(change: list[float], verdict: str) -> None:
    result = compare.judge("step", [1.0] * 4, change)
    assert result["verdict"] == verdict
    assert result["ratio"]["low"] < result["ratio"]["median"] < result["ratio"]["high"]


def test_interval_follows_the_t_distribution() -> None:
    # Logarithms -0.1, 0.0 and 0.1: mean 0, standard error 0.1 / sqrt(3), t(0.975, 2) = 4.303.
    result = compare.judge("step", [1.0] * 3, [0.904837, 1.0, 1.105171])
    assert result["ratio"]["high"] == pytest.approx(2.71828 ** (4.30265 * 0.1 / 3**0.5), rel=1e-4)


def commit(folder: Path) -> str:
    words = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no git checkout")
    return done.stdout.strip()


def test_unknown_commit_raises(tmp_path: Path) -> None:
    commit(ROOT)
    with (
        pytest.raises(ConfigurationError, match="no-such-commit"),
        compare.worktree(ROOT, "no-such-commit"),
    ):
        pass


@pytest.mark.long
def test_smoke_compares_the_last_commit_with_this_tree(tmp_path: Path) -> None:
    line = ["compare", commit(ROOT), "--smoke", "--data-dir", "data", "--json", "compare.json"]
    run(tmp_path, *line, program="benchmarks")
    results = json.loads((tmp_path / "compare.json").read_text())["results"]
    assert [one["quantity"].partition(",")[0] for one in results] == [
        *["step"] * 4, "first step", "input",
    ]  # fmt: skip
    assert {one["verdict"] for one in results} <= {"faster", "slower", "equal"}
    words = ["git", "-C", str(ROOT), "worktree", "list"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "tfdist-compare-" not in listed
