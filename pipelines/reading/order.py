"""The order of an epoch and the seeds of its examples, as pure functions of seed and epoch.

Shuffling first permutes all blocks that a pipeline reads, and then the records within windows of
the size of the shuffle buffer, which therefore contain records of many files. Reading can start at
any position of this order, and reads only the window around it again.
"""

from __future__ import annotations

import tensorflow as tf

from pipelines.reading.blocks import Blocks, Reader, Records

# Numbers that are folded into a seed, so that draws from the same seed are independent.
BLOCKS_STREAM, WINDOWS_STREAM, EXAMPLES_STREAM, BATCHES_STREAM = 1, 2, 3, 4


def epoch_seed(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Returns the seed of an epoch, int32 `(2,)`."""
    pair = tf.constant([seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF], tf.int32)
    return tf.random.experimental.stateless_fold_in(pair, epoch)


def example_seeds(epoch_seed: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Returns the seed of each example, int32 `(..., 2)`, from epoch seed and record number.

    The augmentation of an example therefore does not depend on which worker reads it, or when.
    """
    key = tf.random.experimental.stateless_fold_in(epoch_seed, EXAMPLES_STREAM)[0]
    numbers = tf.cast(numbers, tf.int32)
    return tf.stack([tf.broadcast_to(key, tf.shape(numbers)), numbers], axis=-1)


def batch_seed(example_seeds: tf.Tensor) -> tf.Tensor:
    """Returns the seed of a batch, int32 `(2,)`, derived from that of its first example."""
    return tf.random.experimental.stateless_fold_in(example_seeds[0], BATCHES_STREAM)


def permutation(count: tf.Tensor, seed: tf.Tensor, stream: tf.Tensor | int) -> tf.Tensor:
    """Returns a random permutation of the numbers below `count`, one for each `stream`."""
    seed = tf.random.experimental.stateless_fold_in(seed, stream)
    return tf.random.experimental.stateless_shuffle(tf.range(count), seed)


def in_order(starts: tf.data.Dataset, blocks: Blocks, read: Reader) -> tf.data.Dataset:
    """Returns the records in the order of the blocks.

    Args:
        starts: One element: the epoch, and the number of its records to skip, int64 `(2,)`.
        blocks: All blocks.
        read: Reads blocks.

    Returns:
        A dataset of `Records` of any lengths.
    """
    return read(starts.map(lambda start: _rest(blocks, start[1], start)))


def shuffled(
    starts: tf.data.Dataset,
    blocks: Blocks,
    read: Reader,
    *,
    seed: int,
    window: int,
) -> tf.data.Dataset:
    """Returns the records in an order that depends on seed and epoch only.

    Args:
        starts: One element: the epoch, and the number of its records to skip, int64 `(2,)`.
        blocks: All blocks.
        read: Reads blocks.
        seed: Seed of all epochs.
        window: Number of records that are shuffled together.

    Returns:
        A dataset of `Records` of up to `window` records.
    """

    def shuffled_blocks(start: tf.Tensor) -> Blocks:
        of_epoch = epoch_seed(seed, start[0])
        places = permutation(tf.size(blocks.count), of_epoch, BLOCKS_STREAM)
        # From the beginning of the window that contains the first record to yield.
        return _rest(blocks.rows(places), start[1] // window * window, start)

    def shuffled_records(number: tf.Tensor, records: Records) -> Records:
        records = Records(*records)
        num_skipped = records.num_skipped
        of_windows = tf.random.experimental.stateless_fold_in(
            epoch_seed(seed, records.epoch), WINDOWS_STREAM
        )
        num_records = tf.size(records.numbers)
        places = permutation(num_records, of_windows, num_skipped // window + number)
        places = places[tf.where(number == 0, num_skipped % window, 0) :]
        return Records(*(tf.gather(column, places) for column in records))

    dataset = read(starts.map(shuffled_blocks)).rebatch(window)
    # The next window is filled while this one is consumed.
    return dataset.enumerate().map(shuffled_records).prefetch(1)


def _rest(blocks: Blocks, num_records: tf.Tensor, start: tf.Tensor) -> Blocks:
    """Returns the blocks without their first `num_records` records."""
    begins = tf.cumsum(blocks.count, exclusive=True)
    blocks = blocks._replace(
        skip=tf.maximum(num_records - begins, 0),
        start=tf.broadcast_to(start, [tf.size(begins), 2]),
    )
    return blocks.rows(tf.where(begins + blocks.count > num_records)[:, 0])
