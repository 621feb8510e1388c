"""Comparing what workers read with what the files hold, record by record.

What the files hold is read by other means than reading is: byte by byte, in one process. Records
are told apart by a hash of 63 bits over all their features; equal ones have to come equally often.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tensorflow as tf

from pipelines.errors import DataError
from pipelines.format import record_file
from pipelines.format.decode import decode
from pipelines.format.index import Index, load_index
from pipelines.reading.read import read

_NUM_HASHES = 2**63 - 1
_HASHES_AT_ONCE = 256
_SEED = 0


@dataclass
class Epoch:
    """What came in one epoch.

    Attributes:
        workers: records and batches of each.
        never_read: where each record is that did not come, or not as often as it is there.
        read_again: where each record is that came too often; "foreign" for any that is nowhere.
    """

    workers: list[tuple[int, int]] = field(default_factory=list)
    never_read: list[str] = field(default_factory=list)
    read_again: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether each record came once."""
        return not self.never_read and not self.read_again


def check(
    directory: Path, *, num_workers: int, batch_size: int, num_epochs: int, shuffle_buffer: int
) -> list[Epoch]:
    """Reads a folder as workers would.

    Args:
        directory: a folder with an index.
        num_workers: input pipelines that divide the data.
        batch_size: of each worker.
        num_epochs: to read.
        shuffle_buffer: examples to shuffle among.

    Returns:
        What came in each epoch.

    Raises:
        DataError: the folder has no index, is damaged, or has too few records.
    """
    index = load_index(directory)
    places = _places(directory, index)
    expected = Counter({hashed: len(found) for hashed, found in places.items()})
    read_by_worker = [
        read(
            directory,
            batch_size * num_workers,
            shuffle_buffer=shuffle_buffer,
            seed=_SEED,
            decode_images=False,
            map_fn=_hash,
            context=tf.distribute.InputContext(num_workers, worker, num_workers),
        )
        for worker in range(num_workers)
    ]
    epochs = []
    for _ in range(num_epochs):
        epoch, came = Epoch(), Counter[int]()
        for dataset in read_by_worker:
            batches = _batches(dataset)
            epoch.workers.append((sum(map(len, batches)), len(batches)))
            came.update(hashed for batch in batches for hashed in batch)
        epoch.never_read = [places[h][0] for h in (expected - came).elements()]
        epoch.read_again = [places.get(h, ["foreign"])[0] for h in (came - expected).elements()]
        epochs.append(epoch)
    return epochs


def _batches(dataset: tf.data.Dataset) -> list[list[int]]:
    """The hashes of one worker's records, batch by batch."""
    try:
        return [batch.tolist() for batch in dataset.as_numpy_iterator()]
    except tf.errors.OpError as error:
        raise DataError(str(error.message).partition("\n")[0]) from None


def _places(directory: Path, index: Index) -> dict[int, list[str]]:
    """Where the files hold each record, by its hash."""

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string)])
    def hashes(serialized: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(
            lambda record: _hash(decode(record, index.features, decode_images=False)),
            serialized,
            fn_output_signature=tf.int64,
        )

    places: dict[int, list[str]] = {}
    records = _records(directory, index)
    while chunk := list(itertools.islice(records, _HASHES_AT_ONCE)):
        hashed = hashes([data for _, data in chunk]).numpy().tolist()
        for (place, _), of_record in zip(chunk, hashed, strict=True):
            places.setdefault(of_record, []).append(place)
    return places


def _records(directory: Path, index: Index) -> Iterator[tuple[str, bytes]]:
    """All records, each with where it is; a damaged one is an error."""
    for shard in index.shards:
        path = directory / shard.name
        for record in record_file.sound_records(path, index.compression):
            yield f"{path}: record at byte {record.offset}", record.data


def _hash(example: dict[str, tf.Tensor]) -> tf.Tensor:
    """One number for all features of an example."""
    values = [tf.io.serialize_tensor(example[name]) for name in sorted(example)]
    return tf.strings.to_hash_bucket_fast(tf.strings.join(values, "|"), _NUM_HASHES)
