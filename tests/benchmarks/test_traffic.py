"""Bytes between hosts: the devices of a host together send what one of them would alone."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.__main__ import main


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("per_host", [1, 2])
def test_one_device_of_a_host_sends_to_other_hosts(per_host: int, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    assert main(["traffic", "--per-host", str(per_host), "--smoke", "--table", str(table)]) == 0
    with table.open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["sent"]) == pytest.approx(float(row["separate devices"]) / per_host, rel=0.03)
