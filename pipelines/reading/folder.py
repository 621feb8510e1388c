"""One pipeline's share of a folder, as a stream of serialized records from any place on."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Literal

import tensorflow as tf

from pipelines.errors import DataError
from pipelines.format import offsets
from pipelines.format.index import check_shards, load_index
from pipelines.reading import block_reader as records
from pipelines.reading import blocks, order
from pipelines.reading.division import share_of
from pipelines.reading.tuning import DEFAULT, Tuning


class Folder:
    """A folder's shards, checked, divided and cut into blocks.

    Args:
        directory: the folder.
        context: says which share is this pipeline's; None: all.
        shuffle_buffer: records that change places among each other; 0 keeps the order of the files.
        seed: of all orders; None draws one.
        on_corrupt: whether a corrupt record is an error, or left out, counted and logged.
        portable: use no Python while reading, so that another process can.
        tuning: how much is done at once.

    Attributes:
        features: of every record.
        num_records: of this pipeline's share, at least one.
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
        on_corrupt: Literal["raise", "skip"] = "raise",
        portable: bool = False,
        tuning: Tuning = DEFAULT,
    ) -> None:
        index = load_index(directory)
        num_pipelines = context.num_input_pipelines if context else 1
        shares = share_of(index.shards, num_pipelines, context.input_pipeline_id if context else 0)
        check_shards(directory, (share.shard for share in shares))
        self.features = index.features
        self.num_records = sum(share.num_records for share in shares)
        self.seed = secrets.randbits(31) if seed is None else seed
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
        size = blocks.records_per_block(index, shuffle_buffer)
        table = None if index.compression else offsets.load(directory, index)
        self._blocks = blocks.of_share(directory, index, shares, size=size, offsets=table)
        if table is None:
            self._read = records.sequential_reader(index.compression, size)
        else:
            skipped = records.Skipped() if on_corrupt == "skip" else None
            self._read = records.reader(table, skipped, portable=portable)
        self._num_reads = 1 if table is None else tuning.num_reads
        parts = [shard.model_dump_json() for shard in index.shards]
        parts += [f"{share.shard.name} {share.start} {share.stop}" for share in shares]
        self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        self._chunk = size
        self._window = min(shuffle_buffer, self.num_records)

    def stream(self, positions: tf.data.Dataset) -> tf.data.Dataset:
        """Records of an epoch.

        Args:
            positions: one element: the epoch, and records of it to leave out, int64 `(2,)`.

        Returns:
            A dataset of `order.Records` of any lengths.
        """
        if not self._window:
            return order.in_order(positions, self._blocks, self._read, self._num_reads)
        return order.shuffled(
            positions,
            self._blocks,
            self._read,
            self._num_reads,
            seed=self.seed,
            window=self._window,
        )

    def in_any_order(self) -> tf.data.Dataset:
        """All records, as a dataset of `order.Records` that can be divided into blocks."""
        places = tf.range(tf.size(self._blocks.count))
        if self._window:
            places = tf.random.shuffle(places, self.seed)
        dataset = tf.data.Dataset.from_tensor_slices(self._blocks.rows(places))
        dataset = dataset.interleave(self._read, num_parallel_calls=self._num_reads)
        if self._window:
            # Not the blocks again: a buffer of them would leave other workers nothing to do.
            dataset = dataset.unbatch().shuffle(self._window).batch(self._chunk)
        return dataset

    def seeded_anyhow(self, records: order.Records) -> tuple[tf.Tensor, tf.Tensor]:
        """As `seeded`, with seeds that are drawn anew each time."""
        shape = [tf.size(records.numbers), 2]
        seeds = tf.random.uniform(shape, tf.int32.min, tf.int32.max, tf.int32)
        return records.serialized, seeds

    def seeded(self, records: order.Records) -> tuple[tf.Tensor, tf.Tensor]:
        """The serialized records `(n,)`, and a seed for each, int32 `(n, 2)`."""
        seed = order.of_epoch(self.seed, records.epoch)
        return records.serialized, order.of_examples(seed, records.numbers)
