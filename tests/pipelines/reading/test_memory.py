"""A dataset larger than the shuffle buffer is not held in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

import pipelines

NUM_RECORDS, RECORD_BYTES = 1000, 400_000
BUFFER = 20
#: Three times the buffer, with blocks and batches in progress: a fraction of the dataset's 400 MB.
MOST_BYTES = 200_000_000


def test_resident_size_is_bounded(tmp_path: Path) -> None:
    def examples() -> Iterator[dict[str, object]]:
        for i in range(NUM_RECORDS):
            yield {"x": np.full(RECORD_BYTES, i % 256, np.uint8)}

    feature = pipelines.Feature(name="x", dtype="uint8", shape=(RECORD_BYTES,))
    pipelines.write_shards(examples(), tmp_path / "d", [feature], num_shards=4, source="large")
    dataset = pipelines.read(tmp_path / "d", 4, shuffle_buffer=BUFFER, seed=1)
    process, most, count = psutil.Process(), 0, 0
    before = process.memory_info().rss
    for batch in dataset:
        count += len(batch["x"])
        most = max(most, process.memory_info().rss - before)
    assert count == NUM_RECORDS
    print(f"at most {most / 1e6:.0f} MB more than before")
    assert most < MOST_BYTES
