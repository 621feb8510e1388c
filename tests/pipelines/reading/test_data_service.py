"""A `tf.data` service reads each record once; a large dataset is not held in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf

import pipelines
from tests.support import numbers

NUM_RECORDS, RECORD_BYTES = 1000, 400_000
BUFFER = 20
#: Three times the buffer, with blocks and batches in progress: a fraction of the dataset's 400 MB.
MOST_BYTES = 200_000_000


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    dispatcher_address = dispatcher.target.partition("://")[2]
    workers = [
        service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher_address))
        for _ in range(2)
    ]
    yield dispatcher.target
    for server in [*workers, dispatcher]:
        server._stop()


@pytest.mark.parametrize(
    "reading", [{}, {"shuffle_buffer": 30}, {"augment_fn": lambda example, seed: example}]
)
def test_each_record_once_an_epoch(tmp_path: Path, address: str, reading: dict[str, Any]) -> None:
    numbers.write(tmp_path, 103, 4)
    dataset = pipelines.read(tmp_path, 10, data_service=address, **reading)
    assert dataset.cardinality() == 11
    for _ in range(2):
        batches = [batch["number"].tolist() for batch in dataset.as_numpy_iterator()]
        assert [len(batch) for batch in batches] == [10] * 10 + [3]
        assert sorted(i for batch in batches for i in batch) == list(range(103))


def test_corrupt_shard_is_named(tmp_path: Path, address: str) -> None:
    numbers.write(tmp_path, 100, 2)
    dataset = pipelines.read(tmp_path, 10, data_service=address)
    shard = sorted(tmp_path.glob("*.tfrecord"))[1]
    data = bytearray(shard.read_bytes())
    data[-10] ^= 1
    shard.write_bytes(data)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{shard}: corrupt or truncated"):
        numbers.order(dataset)


@pytest.mark.parametrize("also", [{"cache": "memory"}, {"on_corrupt": "skip"}])
def test_unsupported_options_of_a_service_raise(tmp_path: Path, also: dict[str, Any]) -> None:
    numbers.write(tmp_path, 10, 1)
    with pytest.raises(ValueError, match="data_service: cannot be combined"):
        pipelines.read(tmp_path, 5, data_service="grpc://localhost:1", **also)


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
