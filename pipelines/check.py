"""`python -m pipelines.check DIR`: checks that workers read each record once per epoch.

The contents of the files are read independently of `pipelines.read`: byte by byte, in one process.
Records are identified by a hash of 63 bits over all their features; equal records must be read as
often as they are stored.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt

from pipelines import storage
from pipelines.console import command_line
from pipelines.errors import DataError, cause_of
from pipelines.format import record_file
from pipelines.format.index import Index, load_index
from pipelines.storage import AnyPath

if TYPE_CHECKING:
    import tensorflow as tf

_NUM_HASHES = 2**63 - 1
_HASHES_AT_ONCE = 256
_SEED = 0
_DESCRIPTION = """Reads a folder as several workers would, and compares the records with the
contents of the files: all workers together must read each record exactly once per epoch. Otherwise
the exit code is 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command_line.run(_parser(), _check, arguments)


def _check(
    directory: str, num_workers: int, batch_size: int, num_epochs: int, shuffle_buffer: int
) -> None:
    epochs = check(
        storage.at(directory),
        num_workers=num_workers,
        batch_size=batch_size,
        num_epochs=num_epochs,
        shuffle_buffer=shuffle_buffer,
    )
    command_line.print_table(
        ("epoch", "worker", "records", "batches"),
        (
            (str(number), str(worker), f"{records:,}", f"{batches:,}")
            for number, epoch in enumerate(epochs, start=1)
            for worker, (records, batches) in enumerate(epoch.workers)
        ),
    )
    for epoch in epochs:
        if not epoch.is_exact:
            first = next(iter([*epoch.never_read, *epoch.read_again]))
            raise DataError(
                f"{directory}: {len(epoch.never_read)} records were never read, "
                f"{len(epoch.read_again)} were read again; the first is {first}"
            )
    num_records = sum(records for records, _ in epochs[0].workers)
    print(f"Each of {num_records:,} records was read exactly once in each of {num_epochs} epochs.")


def _parser() -> ArgumentParser:
    parser = command_line.parser("check", _DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="folder or URL with an index")
    parser.add_argument("--num-workers", type=PositiveInt, default=1, help="workers to simulate")
    parser.add_argument("--batch-size", type=PositiveInt, default=32, help="records per worker")
    parser.add_argument("--num-epochs", type=PositiveInt, default=2, help="epochs to read")
    parser.add_argument(
        "--shuffle-buffer", type=NonNegativeInt, default=1000, help="examples; 0 does not shuffle"
    )
    return parser


@dataclass
class Epoch:
    """The records read in one epoch.

    Attributes:
        workers: Number of records and batches of each worker.
        never_read: Locations of records that were read less often than they are stored.
        read_again: Locations of records that were read too often; "foreign" for a record that is
            not in the files.
    """

    workers: list[tuple[int, int]] = field(default_factory=list)
    never_read: list[str] = field(default_factory=list)
    read_again: list[str] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Whether each record was read exactly as often as it is stored."""
        return not self.never_read and not self.read_again


def check(
    directory: AnyPath, *, num_workers: int, batch_size: int, num_epochs: int, shuffle_buffer: int
) -> list[Epoch]:
    """Reads a folder as several workers would.

    Returns:
        The records read in each epoch.

    Raises:
        DataError: The folder has no index, is damaged, or has too few records.
    """
    import tensorflow as tf

    from pipelines.reading.read import read

    index = load_index(directory)
    places = _places(directory, index)
    expected = Counter({hashed: len(locations) for hashed, locations in places.items()})
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
        epoch, num_read = Epoch(), Counter[int]()
        for dataset in read_by_worker:
            try:
                batches = [batch.tolist() for batch in dataset.as_numpy_iterator()]
            except tf.errors.OpError as error:
                raise DataError(cause_of(error)) from None
            epoch.workers.append((sum(map(len, batches)), len(batches)))
            num_read.update(hashed for batch in batches for hashed in batch)
        epoch.never_read = [places[h][0] for h in (expected - num_read).elements()]
        epoch.read_again = [places.get(h, ["foreign"])[0] for h in (num_read - expected).elements()]
        epochs.append(epoch)
    return epochs


def _places(directory: AnyPath, index: Index) -> dict[int, list[str]]:
    import tensorflow as tf

    from pipelines.format.examples import decode

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
        for (location, _), record_hash in zip(chunk, hashed, strict=True):
            places.setdefault(record_hash, []).append(location)
    return places


def _records(directory: AnyPath, index: Index) -> Iterator[tuple[str, bytes]]:
    """Yields the location and data of all records; raises if one is damaged."""
    for shard in index.shards:
        path = directory / shard.name
        for record in record_file.intact_records(path, index.compression):
            yield f"{path}: record at byte {record.offset}", record.data


def _hash(example: dict[str, tf.Tensor]) -> tf.Tensor:
    import tensorflow as tf

    values = [tf.io.serialize_tensor(example[name]) for name in sorted(example)]
    return tf.strings.to_hash_bucket_fast(tf.strings.join(values, "|"), _NUM_HASHES)


if __name__ == "__main__":
    sys.exit(main())
