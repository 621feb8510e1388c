"""The order of an epoch, as a function of seed and epoch alone: nothing is remembered.

Blocks change places over all that a pipeline reads; then records change places within windows of as
many as the shuffle buffer holds, which so come from many files. Any place of this order can be
begun at: only the window that holds it is read again.
"""

from __future__ import annotations

import tensorflow as tf

from pipelines.reading import seeds
from pipelines.reading.blocks import Blocks, Reader, Records

#: Blocks that may be read at once where `tf.data` chooses.
_MOST_READS = 16


def in_order(
    starts: tf.data.Dataset, blocks: Blocks, read: Reader, num_reads: int
) -> tf.data.Dataset:
    """Records in the order of the blocks.

    Args:
        starts: one element: the epoch, and records of it to leave out, int64 `(2,)`.
        blocks: all of them.
        read: reads a block.
        num_reads: blocks read at once; 1 unless a block is one element.

    Returns:
        A dataset of `Records` of any lengths.
    """
    return _read(starts.map(lambda start: _rest(blocks, start[1], start)), read, num_reads)


def shuffled(
    starts: tf.data.Dataset,
    blocks: Blocks,
    read: Reader,
    num_reads: int,
    *,
    seed: int,
    window: int,
) -> tf.data.Dataset:
    """Records in an order that follows from seed and epoch.

    Args:
        starts: one element: the epoch, and records of it to leave out, int64 `(2,)`.
        blocks: all of them.
        read: reads a block.
        num_reads: blocks read at once.
        seed: of all epochs.
        window: records that change places among each other.

    Returns:
        A dataset of `Records` of up to `window` records.
    """

    def mixed_blocks(start: tf.Tensor) -> Blocks:
        of_epoch = seeds.of_epoch(seed, start[0])
        places = seeds.permutation(tf.size(blocks.count), of_epoch, seeds.OF_BLOCKS)
        # From the beginning of the window in which the first wanted record lies.
        return _rest(blocks.rows(places), start[1] // window * window, start)

    def mixed_records(number: tf.Tensor, records: Records) -> Records:
        records = Records(*records)
        left_out = records.left_out
        of_windows = tf.random.experimental.stateless_fold_in(
            seeds.of_epoch(seed, records.epoch), seeds.OF_WINDOWS
        )
        num_records = tf.size(records.numbers)
        places = seeds.permutation(num_records, of_windows, left_out // window + number)
        places = places[tf.where(number == 0, left_out % window, 0) :]
        return Records(*(tf.gather(column, places) for column in records))

    dataset = _read(starts.map(mixed_blocks), read, num_reads).rebatch(window)
    # The next window is filled while this one is taken.
    return dataset.enumerate().map(mixed_records).prefetch(1)


def _rest(blocks: Blocks, num_records: tf.Tensor, start: tf.Tensor) -> Blocks:
    """What is left of blocks, laid end to end, behind their first `num_records`."""
    begins = tf.cumsum(blocks.count, exclusive=True)
    blocks = blocks._replace(
        skip=tf.maximum(num_records - begins, 0),
        start=tf.broadcast_to(start, [tf.size(begins), 2]),
    )
    return blocks.rows(tf.where(begins + blocks.count > num_records)[:, 0])


def _read(blocks: tf.data.Dataset, read: Reader, num_reads: int) -> tf.data.Dataset:
    # A block is one element, or is the only one under way: the order of the blocks is kept.
    return blocks.unbatch().interleave(
        read,
        cycle_length=num_reads if num_reads > 0 else _MOST_READS,
        block_length=1,
        num_parallel_calls=num_reads,
    )
