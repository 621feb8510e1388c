"""Shards of records that contain their own index, so that lost or repeated records show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

import pipelines
from pipelines.format import record_file

FEATURES = (
    pipelines.Feature(name="number", dtype="int32", encoding="list"),
    pipelines.Feature(name="array", dtype="uint8", shape=(2, 3)),
)


def examples(num_records: int) -> Iterator[dict[str, object]]:
    """Yields records 0, 1, ..., each with an array derived from its index."""
    for i in range(num_records):
        yield {"number": i, "array": np.full((2, 3), i % 256, np.uint8)}


def write(directory: Path | str, num_records: int, num_shards: int) -> pipelines.Index:
    """Writes the records as shards, and returns the index."""
    return pipelines.write_shards(
        examples(num_records), directory, FEATURES, num_shards=num_shards, source="numbers"
    )


def compress(directory: Path, compression: str) -> pipelines.Index:
    """Compresses the shards of a folder, removes their offsets, and returns the new index."""
    index = pipelines.load_index(directory)
    shards = []
    for shard in index.shards:
        path = directory / shard.name
        records = [record.data for record in record_file.records(path)]
        with tf.io.TFRecordWriter(str(path), compression) as writer:
            for record in records:
                writer.write(record)
        shards.append(shard.model_copy(update={"num_bytes": path.stat().st_size}))
    index = index.model_copy(update={"compression": compression, "shards": tuple(shards)})
    (directory / "index.json").write_text(index.model_dump_json())
    (directory / "offsets.npz").unlink(missing_ok=True)
    return index


def shard(directory: Path, number: int) -> Path:
    """Returns the path of a shard."""
    return sorted(directory.glob("*.tfrecord"))[number]


def order(dataset: tf.data.Dataset) -> list[int]:
    """Returns the record numbers of one epoch in order."""
    return [int(i) for batch in dataset.as_numpy_iterator() for i in batch["number"]]


def damage_first_record(folder: Path, index: pipelines.Index) -> Path:
    """Flips a bit in the data of the first record, and returns the path of the shard."""
    path = folder / index.shards[0].name
    data = bytearray(path.read_bytes())
    data[14] ^= 1
    path.write_bytes(data)
    return path


# ---- graphs ----


def ancestors(operation: tf.Operation) -> set[tf.Operation]:
    """Returns all ops that an op depends on, by data or by control edges."""
    results: set[tf.Operation] = set()
    waiting = [operation]
    while waiting:
        one = waiting.pop()
        new = ({tensor.op for tensor in one.inputs} | set(one.control_inputs)) - results
        waiting += new
        results |= new
    return results
