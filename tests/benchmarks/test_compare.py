"""The comparison of two commits: verdicts computed by hand, and the command as a user runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import compare
from tests.support import ROOT
from tests.tools.bench.test_step import run
from tfdist.errors import ConfigurationError


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
