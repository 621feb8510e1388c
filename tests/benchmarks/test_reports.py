"""Sweep, strategies and precision as a user runs them: that they run and what they write."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.tools.bench.test_step import run


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments", "first", "column"),
    [
        ("sweep", [], "CPU", "examples/s"),
        ("strategies", [], None, "efficiency"),
        ("unet", [], None, "efficiency"),
        ("precision", ["--data-dir", "data"], "float32", "accuracy"),
    ],
)
def test_smoke_writes_table_and_chart(
    name: str, arguments: list[str], first: str | None, column: str, tmp_path: Path
) -> None:
    files = ["--json", "a.json", "--table", "a.csv", "--chart", "a.png"]
    run(tmp_path, name, "--smoke", *arguments, *files, program="benchmarks")
    header, *rows = csv.reader((tmp_path / "a.csv").read_text().splitlines())
    assert column in header
    assert len(rows) >= 2
    assert first in (None, rows[0][0])
    assert json.loads((tmp_path / "a.json").read_text())["benchmark"] == name
    assert (tmp_path / "a.png").stat().st_size > 0


def test_wrong_file_is_found_before_measuring(tmp_path: Path) -> None:
    done = run(tmp_path, "sweep", "--table", "a.txt", program="benchmarks", code=1)
    assert "a.txt: expected a name that ends with .md or .csv" in done.stderr
