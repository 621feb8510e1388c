"""The order of an epoch, as a function of seed and epoch alone: nothing is remembered.

Blocks change places over the whole share; then records change places within windows of as many as
the shuffle buffer holds, which so come from many files. Any place of this order can be begun at:
only the window that holds it is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from pipelines.reading.blocks import Blocks

# One seed drives several draws; each begins from another number, or they would repeat each other.
_OF_BLOCKS, _OF_WINDOWS, _OF_EXAMPLES = 1, 2, 3

#: Blocks that may be read at once where `tf.data` chooses.
_MOST_READS = 16

#: One to a dataset of `Records` of any lengths.
Reader = Callable[[Blocks], tf.data.Dataset]


class Records(NamedTuple):
    """Some records on their way.

    Attributes:
        serialized: string `(n,)`.
        numbers: of each among all records of the folder, int64 `(n,)`.
        lap: the epoch, and how many records of it were left out, of each; int64 `(n, 2)`.
    """

    serialized: tf.Tensor
    numbers: tf.Tensor
    lap: tf.Tensor

    @property
    def epoch(self) -> tf.Tensor:
        """The epoch of them all, int64, scalar."""
        # Not the first's: where a block is corrupt and left out, there is none.
        return tf.reduce_max(self.lap[:, 0])


def in_order(
    positions: tf.data.Dataset, blocks: Blocks, read: Reader, num_reads: int
) -> tf.data.Dataset:
    """Records in the order of the blocks.

    Args:
        positions: one element: the epoch, and records of it to leave out, int64 `(2,)`.
        blocks: all of them.
        read: reads a block.
        num_reads: blocks read at once; 1 unless a block is one element.

    Returns:
        A dataset of `Records` of any lengths.
    """
    return _read(positions.map(lambda p: _behind(blocks, p[1], p)), read, num_reads)


def shuffled(
    positions: tf.data.Dataset,
    blocks: Blocks,
    read: Reader,
    num_reads: int,
    *,
    seed: int,
    window: int,
) -> tf.data.Dataset:
    """Records in an order that follows from seed and epoch.

    Args:
        positions: one element: the epoch, and records of it to leave out, int64 `(2,)`.
        blocks: all of them.
        read: reads a block.
        num_reads: blocks read at once.
        seed: of all epochs.
        window: records that change places among each other.

    Returns:
        A dataset of `Records` of up to `window` records.
    """

    def mixed_blocks(position: tf.Tensor) -> Blocks:
        places = _places(tf.size(blocks.count), of_epoch(seed, position[0]), _OF_BLOCKS)
        # From the beginning of the window in which the position lies.
        return _behind(blocks.rows(places), position[1] // window * window, position)

    def mixed(number: tf.Tensor, records: Records) -> Records:
        records = Records(*records)
        left_out = tf.reduce_max(records.lap[:, 1])
        of_windows = tf.random.experimental.stateless_fold_in(
            of_epoch(seed, records.epoch), _OF_WINDOWS
        )
        places = _places(tf.size(records.numbers), of_windows, left_out // window + number)
        places = places[tf.where(number == 0, left_out % window, 0) :]
        return Records(*(tf.gather(column, places) for column in records))

    dataset = _read(positions.map(mixed_blocks), read, num_reads).rebatch(window)
    # The next window is filled while this one is taken.
    return dataset.enumerate().map(mixed).prefetch(1)


def of_epoch(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """The seed of an epoch, int32 `(2,)`."""
    pair = tf.constant([seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF], tf.int32)
    return tf.random.experimental.stateless_fold_in(pair, epoch)


def of_examples(seed: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """The seed of each example, int32 `(..., 2)`: from the epoch's seed and the record's number.

    So an example is augmented alike in the same epoch whoever reads it, wherever it stands.
    """
    key = tf.random.experimental.stateless_fold_in(seed, _OF_EXAMPLES)[0]
    numbers = tf.cast(numbers, tf.int32)
    return tf.stack([tf.broadcast_to(key, tf.shape(numbers)), numbers], axis=-1)


def _behind(blocks: Blocks, start: tf.Tensor, lap: tf.Tensor) -> Blocks:
    """What is left of blocks, laid end to end, behind their first `start` records."""
    begins = tf.cumsum(blocks.count, exclusive=True)
    blocks = blocks._replace(
        skip=tf.maximum(start - begins, 0), lap=tf.broadcast_to(lap, [tf.size(begins), 2])
    )
    return blocks.rows(tf.where(begins + blocks.count > start)[:, 0])


def _read(blocks: tf.data.Dataset, read: Reader, num_reads: int) -> tf.data.Dataset:
    # A block is one element, or is the only one under way: the order of the blocks is kept.
    return blocks.unbatch().interleave(
        read,
        cycle_length=num_reads if num_reads > 0 else _MOST_READS,
        block_length=1,
        num_parallel_calls=num_reads,
    )


def _places(count: tf.Tensor, seed: tf.Tensor, of: tf.Tensor | int) -> tf.Tensor:
    """A permutation of `count` places."""
    seed = tf.random.experimental.stateless_fold_in(seed, of)
    return tf.random.experimental.stateless_shuffle(tf.range(count), seed)
