"""Reading from an S3 server beside other libraries, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import buckets
from tests.tools.bench.test_step import run


@pytest.mark.long
def test_every_reader_reads_one_cold_epoch(tmp_path: Path) -> None:
    buckets.require_s3()
    run(tmp_path, "bucket", "--peers", "--smoke", "--json", "a.json", program="benchmarks")
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    assert {"pipelines", "downloaded first"} <= {row["reader"] for row in results}
    assert all(0 < one["first_s"] <= one["s"] for row in results for one in row["samples"])
