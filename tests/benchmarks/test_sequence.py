"""`python -m benchmarks sequence`: bytes and memory of activations in parts."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.__main__ import main


@pytest.mark.long
def test_parts_of_rows_exchange_and_hold_what_formulas_say(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    assert main(["sequence", "--devices", "2", "--rounds", "1", "--table", str(table)]) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    found = {(row["activations"], row["device"]): row for row in rows}
    exchanged, held = (float(found["formula", "each"][key]) for key in ("received", "memory"))
    before = found["--split-activations none", "1"]
    assert float(before["received"]) == pytest.approx(4, rel=0.02)
    for device in "12":
        row = found["--split-activations rows", device]
        assert float(row["received"]) == pytest.approx(exchanged, rel=0.02)
        assert float(row["memory"]) == pytest.approx(held, rel=0.05)
        assert float(row["memory"]) < 0.95 * float(before["memory"])
