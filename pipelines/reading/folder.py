"""The part of a folder that one pipeline reads, as a stream of serialized records."""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from pipelines import storage
from pipelines.errors import DataError, cause_of
from pipelines.format import offsets
from pipelines.format.examples import decode
from pipelines.format.index import Index, check_shards, load_index
from pipelines.reading import order
from pipelines.reading.block_reader import SkippedRecords, block_reader, sequential_reader
from pipelines.reading.blocks import (
    Reader,
    Records,
    ShardRange,
    divide_shards,
    make_blocks,
    records_per_block,
)
from pipelines.reading.position import Record
from pipelines.reading.read_ahead import Fetch, cache_ranges
from pipelines.reading.remote_reader import fetch_range, remote_reader, remote_sequential_reader
from pipelines.reading.tuning import DEFAULT, Tuning
from pipelines.storage import AnyPath, RemotePath

#: Whether a corrupt record is an error or is skipped.
OnCorrupt = Literal["raise", "skip"]


class Folder:
    """The shards of a folder, checked, divided among pipelines and cut into blocks.

    Args:
        directory: The folder.
        context: Identifies this pipeline among those that divide the folder; None: the only one.
        shuffle_buffer: Number of records that are shuffled together; 0 keeps the file order.
        seed: Seed of all orders; None draws one.
        on_corrupt: Whether a corrupt record is an error, or is skipped, counted and logged.
        portable: Whether to avoid Python functions, so that another process can run the graph.
        tuning: Performance settings.

    Attributes:
        features: Features of every record.
        num_records: Number of records that this pipeline reads, at least one.
        seed: The seed, given or drawn.
        fingerprint: Identifies these records of these files in this order.

    Raises:
        DataError: The index or a shard is missing, damaged or has another size, or there are fewer
            records than pipelines.
        ValueError: `on_corrupt="skip"` with compressed shards.
    """

    def __init__(
        self,
        directory: str | AnyPath,
        *,
        context: tf.distribute.InputContext | None = None,
        shuffle_buffer: int = 0,
        seed: int | None = None,
        on_corrupt: OnCorrupt = "raise",
        portable: bool = False,
        tuning: Tuning = DEFAULT,
    ) -> None:
        directory = storage.at(directory)
        index = load_index(directory)
        num_pipelines = context.num_input_pipelines if context else 1
        ranges = divide_shards(
            index.shards, num_pipelines, context.input_pipeline_id if context else 0
        )
        check_shards(directory, (shard for shard, _, _ in ranges))
        self.features = index.features
        self._shards = [(str(directory / shard.name), shard.num_records) for shard in index.shards]
        self.num_records = sum(shard_range.num_records for shard_range in ranges)
        self.seed = secrets.randbits(31) if seed is None else seed
        self.fingerprint = _fingerprint(index, ranges)
        if self.num_records == 0:
            raise DataError(
                f"{directory}: expected at least one record for each of {num_pipelines} input "
                f"pipelines, found {index.num_records} in total; use fewer workers"
            )
        if on_corrupt == "skip" and index.compression:
            raise ValueError(
                f"on_corrupt: expected 'raise' for {directory}, got 'skip': a compressed shard "
                "cannot be read beyond damage; pack without --compression"
            )
        self._images = [f for f in index.features if f.is_image]
        self._window = min(shuffle_buffer, self.num_records)
        self._num_maps = tuning.num_maps
        self._block_size = records_per_block(index, shuffle_buffer)
        table = None if index.compression else offsets.load(directory, index)
        skipped = self._skipped = SkippedRecords() if on_corrupt == "skip" else None
        if isinstance(directory, RemotePath):
            if portable:
                raise ValueError(
                    f"data_service: expected a local folder, got {directory}: the workers of a "
                    "service cannot read URLs; mount the bucket, or read without a service"
                )
            self._read = _remote_reader(directory, index, table, skipped, self._block_size, tuning)
        else:
            self._read = (
                sequential_reader(index.compression, self._block_size)
                if table is None
                else block_reader(table, skipped, portable=portable, num_reads=tuning.num_reads)
            )
        self._blocks = make_blocks(directory, index, ranges, size=self._block_size, offsets=table)

    def records(self, start: tf.Tensor) -> tf.data.Dataset:
        """Returns the records of an epoch.

        Args:
            start: The epoch, and the number of its records to skip, int64 `(2,)`.

        Returns:
            A dataset of `Records` of any lengths.
        """
        if not self._window:
            records = order.in_order(start[1], self._blocks, self._read)
        else:
            records = order.shuffled(
                start[1],
                self._blocks,
                self._read,
                seed=order.epoch_seed(self.seed, start[0]),
                window=self._window,
                block_size=self._block_size,
            )
        if self._skipped and self._images:
            check = functools.partial(self._decodable, skipped=self._skipped)
            records = records.map(check, self._num_maps)
        return records

    def _decodable(self, records: Records, skipped: SkippedRecords) -> Records:
        """Returns the records whose images can be decoded; logs and counts the others."""

        def decoded(record: Records) -> tf.Tensor:
            number = record.numbers
            for pixels in decode(record.serialized, self._images).values():
                # Only a value that is used keeps the decoder in the optimized graph.
                first = tf.cast(tf.reshape(pixels, [-1])[0], tf.int64)
                number = tf.where(first < 0, first, number)
            return number

        def report(numbers: np.ndarray) -> np.int64:
            for number in numbers.tolist():
                file, position = self._position(number)
                skipped.add(f"{file}: record {position}: an image cannot be decoded")
            return np.int64(0)

        intact = tf.data.Dataset.from_tensor_slices(records).map(decoded).ignore_errors()
        end = tf.data.Dataset.from_tensors(np.int64(-1))  # so that there is an element
        size = tf.size(records.numbers, tf.int64) + 1
        numbers = intact.concatenate(end).batch(size).take(1).get_single_element()[:-1]
        is_damaged = tf.reduce_all(records.numbers[:, None] != numbers, 1)
        reported = tf.cond(
            tf.reduce_any(is_damaged),
            lambda: tf.numpy_function(
                report, [tf.boolean_mask(records.numbers, is_damaged)], tf.int64, stateful=True
            ),
            lambda: np.int64(0),
        )
        with tf.control_dependencies([reported]):
            return Records(*(tf.boolean_mask(column, ~is_damaged) for column in records))

    def _position(self, number: int) -> tuple[str, int]:
        """Returns the file of a record of the folder, and its number in it from 0."""
        ends = np.cumsum([num_records for _, num_records in self._shards])
        shard = int(np.searchsorted(ends, number, "right"))
        file, num_records = self._shards[shard]
        return file, number - int(ends[shard]) + num_records

    def batch(self, epoch: int, begin: int, size: int) -> list[Record]:
        """Returns some records of an epoch with their places."""
        records = self.records(tf.constant([epoch, begin], tf.int64)).unbatch().take(size)
        return [
            Record(*self._position(int(record.numbers)), record.serialized.numpy())
            for record in records
        ]

    def problem(
        self, make: Callable[[tf.Tensor, tf.Tensor], Any], epoch: int, begin: int, size: int
    ) -> str | None:
        """Returns which of some records `make` fails for, and why; None if it fails for none."""
        make, seed = tf.function(make), order.epoch_seed(self.seed, tf.constant(epoch, tf.int64))
        records = self.records(tf.constant([epoch, begin], tf.int64)).unbatch().take(size)
        for record in records:
            try:
                make(record.serialized, order.example_seeds(seed, record.numbers))
            except tf.errors.OpError as error:
                file, position = self._position(int(record.numbers))
                skip = "; repair it, or skip it with on_corrupt='skip'" if self._images else ""
                return f"{file}: record {position}: {cause_of(error)}{skip}"
        return None

    def stream(self, starts: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the records of epochs with their seeds.

        Args:
            starts: The start of each epoch, as for `records`.

        Returns:
            A dataset of serialized records `(n,)` and their seeds, int32 `(n, 2)`.
        """

        @tf.autograph.experimental.do_not_convert  # it warns about Python generators
        def of_epoch(start: tf.Tensor) -> tf.data.Dataset:
            seed = order.epoch_seed(self.seed, start[0])

            def with_seeds(records: Records) -> tuple[tf.Tensor, tf.Tensor]:
                return records.serialized, order.example_seeds(seed, records.numbers)

            return self.records(start).map(with_seeds)

        return starts.flat_map(of_epoch)

    def repeated(self, num_taken: tf.Tensor | int = 0) -> tf.data.Dataset:
        """Returns an endless `stream`, epoch after epoch, without the first `num_taken` records."""
        num_taken = tf.convert_to_tensor(num_taken, tf.int64)
        first = num_taken // self.num_records

        def start(epoch: tf.Tensor) -> tf.Tensor:
            return tf.stack([epoch, tf.where(epoch == first, num_taken % self.num_records, 0)])

        return self.stream(tf.data.Dataset.range(first, tf.int64.max).map(start))

    def unordered(self) -> tf.data.Dataset:
        """Returns a `stream` of one epoch that a `tf.data` service can divide.

        The seeds are random, and differ at every iteration.
        """
        places = tf.range(tf.size(self._blocks.count))
        if self._window:
            places = tf.random.shuffle(places, self.seed)
        dataset = self._read(self._blocks.rows(places))
        if self._window:
            # Shuffle records, because a buffer of blocks would leave none for other workers.
            dataset = dataset.unbatch().shuffle(self._window).batch(self._block_size)

        def with_seeds(records: Records) -> tuple[tf.Tensor, tf.Tensor]:
            shape = [tf.size(records.numbers), 2]
            drawn = tf.random.uniform(shape, tf.int32.min, tf.int32.max, tf.int32)
            return records.serialized, drawn

        return dataset.map(with_seeds)


def _remote_reader(
    directory: RemotePath,
    index: Index,
    table: np.ndarray | None,
    skipped: SkippedRecords | None,
    block_size: int,
    tuning: Tuning,
) -> Reader:
    if table is None:
        return remote_sequential_reader(index.compression, block_size)
    fetch: Fetch = fetch_range
    if tuning.cache is not None:
        versions = {str(directory / shard.name): shard.sha256 for shard in index.shards}
        fetch = cache_ranges(fetch_range, tuning.cache, tuning.cache_bytes, versions)
    return remote_reader(
        table,
        skipped,
        fetch=fetch,
        limit=tuning.read_ahead,
        # Merged blocks differ from epoch to epoch, and would not be found in a cache.
        merge=tuning.cache is None,
    )


def _fingerprint(index: Index, ranges: Sequence[ShardRange]) -> str:
    texts = [shard.model_dump_json() for shard in index.shards]
    texts += [f"{shard.name} {start} {stop}" for shard, start, stop in ranges]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


IN_MEMORY = "memory"

_GRAPH_SEED = 1


def cached(
    starts: tf.data.Dataset,
    folder: Folder,
    make: Callable[[tf.Tensor], Any],
    place: str | Path,
    shuffle_buffer: int,
    num_maps: int,
) -> tf.data.Dataset:
    """Returns the results of `make`, computed in the first epoch and cached, with their seeds.

    The cache keeps the order of the files, so that shuffling happens after it.

    Args:
        starts: One element: the epoch, and the number of its records to skip, int64 `(2,)`.
        folder: Reads records in the order of the files.
        make: Function of a serialized record.
        place: `"memory"`, or a folder, which is created.
        shuffle_buffer: Number of examples that are shuffled together; 0: none.
        num_maps: Parallel calls of `make`.

    Returns:
        A dataset of pairs: the result, and the seed, int32 `(2,)`.
    """
    examples = folder.records(tf.constant([0, 0], tf.int64)).unbatch()
    examples = examples.map(lambda record: (make(record.serialized), record.numbers), num_maps)
    if place == IN_MEMORY:
        examples = examples.cache()
    else:
        Path(place).mkdir(parents=True, exist_ok=True)
        examples = examples.cache(str(Path(place) / folder.fingerprint))

    def of_epoch(start: tf.Tensor) -> tf.data.Dataset:
        seed, dataset = order.epoch_seed(folder.seed, start[0]), examples
        if shuffle_buffer:
            buffer = min(shuffle_buffer, folder.num_records)
            # The graph's seed is set because tf.data mixes in the global seed otherwise, and must
            # not be 0, which tf.data would compare with a tensor.
            tf.compat.v1.set_random_seed(_GRAPH_SEED)
            dataset = examples.shuffle(buffer, tf.cast(seed[0], tf.int64), False)
        dataset = dataset.skip(start[1])
        return dataset.map(lambda made, number: (made, order.example_seeds(seed, number)))

    return starts.flat_map(of_epoch)
