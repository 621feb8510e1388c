"""A `tf.data` service reads each record once per epoch, in full batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import pipelines
from tests.support import numbers


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
