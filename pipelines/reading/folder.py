"""What one pipeline reads of a folder, as a stream of serialized records from any place on."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tensorflow as tf

from pipelines.errors import DataError
from pipelines.format import offsets
from pipelines.format.index import Index, check_shards, load_index
from pipelines.reading import order, seeds
from pipelines.reading.block_reader import Skipped, block_reader, sequential_reader
from pipelines.reading.blocks import Records, blocks_of, records_per_block
from pipelines.reading.division import ShardRange, ranges_of
from pipelines.reading.tuning import DEFAULT, Tuning

#: What becomes of a corrupt record: an error, or it is left out.
OnCorrupt = Literal["raise", "skip"]


class Folder:
    """A folder's shards, checked, divided and cut into blocks.

    Args:
        directory: the folder.
        context: says which of the pipelines that divide the folder this is; None: the only one.
        shuffle_buffer: records that change places among each other; 0 keeps the order of the files.
        seed: of all orders; None draws one.
        on_corrupt: whether a corrupt record is an error, or left out, counted and logged.
        portable: use no Python while reading, so that another process can.
        tuning: how much is done at once.

    Attributes:
        features: of every record.
        num_records: that this pipeline reads, at least one.
        seed: the one given or drawn.
        fingerprint: a name for these records of these files, in this order.

    Raises:
        DataError: the index or a shard is missing, damaged or of another size, or there are fewer
            records than pipelines.
        ValueError: corrupt records cannot be left out of compressed shards.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        context: tf.distribute.InputContext | None = None,
        shuffle_buffer: int = 0,
        seed: int | None = None,
        on_corrupt: OnCorrupt = "raise",
        portable: bool = False,
        tuning: Tuning = DEFAULT,
    ) -> None:
        index = load_index(directory)
        num_pipelines = context.num_input_pipelines if context else 1
        ranges = ranges_of(index.shards, num_pipelines, context.input_pipeline_id if context else 0)
        check_shards(directory, (shard for shard, _, _ in ranges))
        self.features = index.features
        self.num_records = sum(of_shard.num_records for of_shard in ranges)
        self.seed = secrets.randbits(31) if seed is None else seed
        self.fingerprint = _fingerprint(index, ranges)
        if self.num_records == 0:
            raise DataError(
                f"{directory}: expected at least one record for each of {num_pipelines} input "
                f"pipelines, found {index.num_records} in all; write more or use fewer workers"
            )
        if on_corrupt == "skip" and index.compression:
            raise ValueError(
                f"on_corrupt: expected 'raise' for {directory}, got 'skip': behind damage nothing "
                "can be found in compressed shards; pack without --compression"
            )
        self._window = min(shuffle_buffer, self.num_records)
        self._block_size = records_per_block(index, shuffle_buffer)
        if index.compression:
            table, self._num_reads = None, 1
            self._read = sequential_reader(index.compression, self._block_size)
        else:
            table, self._num_reads = offsets.load(directory, index), tuning.num_reads
            skipped = Skipped() if on_corrupt == "skip" else None
            self._read = block_reader(table, skipped, portable=portable)
        self._blocks = blocks_of(directory, index, ranges, size=self._block_size, offsets=table)

    def stream(self, starts: tf.data.Dataset) -> tf.data.Dataset:
        """Records of an epoch.

        Args:
            starts: one element: the epoch, and records of it to leave out, int64 `(2,)`.

        Returns:
            A dataset of `Records` of any lengths.
        """
        if not self._window:
            return order.in_order(starts, self._blocks, self._read, self._num_reads)
        return order.shuffled(
            starts,
            self._blocks,
            self._read,
            self._num_reads,
            seed=self.seed,
            window=self._window,
        )

    def for_ever(self, num_taken: tf.Tensor | int = 0) -> tf.data.Dataset:
        """Records with their seeds, epoch after epoch, behind the first `num_taken`.

        Returns:
            A dataset of what `with_seeds` returns.
        """
        num_taken = tf.convert_to_tensor(num_taken, tf.int64)
        first = num_taken // self.num_records

        def of_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            left_out = tf.where(epoch == first, num_taken % self.num_records, 0)
            start = tf.data.Dataset.from_tensors(tf.stack([epoch, left_out]))
            return self.stream(start).map(self.with_seeds)

        return tf.data.Dataset.range(first, tf.int64.max).flat_map(of_epoch)

    def in_any_order(self) -> tf.data.Dataset:
        """All records, as a dataset of `Records` that can be divided into blocks."""
        places = tf.range(tf.size(self._blocks.count))
        if self._window:
            places = tf.random.shuffle(places, self.seed)
        dataset = tf.data.Dataset.from_tensor_slices(self._blocks.rows(places))
        dataset = dataset.interleave(self._read, num_parallel_calls=self._num_reads)
        if self._window:
            # Not the blocks again: a buffer of them would leave other workers nothing to do.
            dataset = dataset.unbatch().shuffle(self._window).batch(self._block_size)
        return dataset

    def with_seeds(self, records: Records) -> tuple[tf.Tensor, tf.Tensor]:
        """The serialized records `(n,)`, and the seed of each in this epoch, int32 `(n, 2)`."""
        of_epoch = seeds.of_epoch(self.seed, records.epoch)
        return records.serialized, seeds.of_examples(of_epoch, records.numbers)

    def with_random_seeds(self, records: Records) -> tuple[tf.Tensor, tf.Tensor]:
        """As `with_seeds`, with seeds that are drawn anew each time."""
        shape = [tf.size(records.numbers), 2]
        drawn = tf.random.uniform(shape, tf.int32.min, tf.int32.max, tf.int32)
        return records.serialized, drawn


def _fingerprint(index: Index, ranges: Sequence[ShardRange]) -> str:
    """Tells these records of these files, in this order, from any others."""
    texts = [shard.model_dump_json() for shard in index.shards]
    texts += [f"{shard.name} {start} {stop}" for shard, start, stop in ranges]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
