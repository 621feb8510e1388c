"""The order of an epoch and the seeds of its examples, as pure functions of seed and epoch.

Shuffling first permutes all blocks that a pipeline reads, and then the records within windows,
which therefore contain records of many files. An epoch begins with small windows, so that the first
batch is soon complete; they double up to the size of the shuffle buffer. Reading can start at any
position of this order, and reads only the window around it again.
"""

from __future__ import annotations

import itertools

import tensorflow as tf

from pipelines.reading.blocks import Blocks, Reader, Records

#: Number of blocks in the first window of an epoch.
_BLOCKS_IN_FIRST_WINDOW = 8
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


def in_order(start: tf.Tensor, blocks: Blocks, read: Reader) -> tf.data.Dataset:
    """Returns the records in the order of the blocks.

    Args:
        start: Number of records of the epoch to skip, int64, scalar.
        blocks: All blocks.
        read: Reads blocks.

    Returns:
        A dataset of `Records` of any lengths.
    """
    return read(_rest(blocks, start))


class Windows:
    """The sizes of the windows of an epoch: 1, 2, 4, ... times the first, up to the largest.

    Args:
        first: Size of the first window.
        largest: Size of all windows after those that are smaller.
    """

    def __init__(self, first: int, largest: int) -> None:
        growing = [first << n for n in range((largest - 1).bit_length()) if first << n < largest]
        self._begins = tf.constant([0, *itertools.accumulate(growing)], tf.int64)
        self._growing, self._largest = tf.constant(growing, tf.int64), largest

    def containing(self, position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the number of the window that contains a position, and where it begins."""
        growing = tf.searchsorted(self._begins, position[tf.newaxis], "right")[0] - 1
        begin = self._begins[growing]
        full = (position - begin) // self._largest  # 0 in a growing window
        return tf.cast(growing, tf.int64) + full, begin + full * self._largest

    def sizes(self, number: tf.Tensor, num_full: tf.Tensor) -> tf.Tensor:
        """Returns the sizes of windows from one on, with a number of full ones at the end."""
        full = tf.fill([num_full], tf.constant(self._largest, tf.int64))
        return tf.concat([self._growing[number:], full], 0)


def shuffled(
    start: tf.Tensor, blocks: Blocks, read: Reader, *, seed: tf.Tensor, window: int, block_size: int
) -> tf.data.Dataset:
    """Returns the records in an order that depends on the seed only.

    Args:
        start: Number of records of the epoch to skip, int64, scalar.
        blocks: All blocks.
        read: Reads blocks.
        seed: Seed of the epoch, int32 `(2,)`.
        window: Number of records that are shuffled together.
        block_size: Most records of a block.

    Returns:
        A dataset of `Records` of up to `window` records.
    """
    windows = Windows(_BLOCKS_IN_FIRST_WINDOW * block_size, window)
    first, begin = windows.containing(start)
    blocks = blocks.rows(permutation(tf.size(blocks.count), seed, BLOCKS_STREAM))
    of_windows = tf.random.experimental.stateless_fold_in(seed, WINDOWS_STREAM)

    def shuffled_window(number: tf.Tensor, records: Records) -> Records:
        places = permutation(tf.size(records.numbers), of_windows, number)
        places = places[tf.where(number == first, start - begin, 0) :]
        return Records(*(tf.gather(column, places) for column in records))

    dataset = read(_rest(blocks, begin)).rebatch(windows.sizes(first, tf.size(blocks.count)))
    # The next window is filled while this one is consumed.
    return dataset.enumerate(first).map(shuffled_window).prefetch(1)


def _rest(blocks: Blocks, num_records: tf.Tensor) -> Blocks:
    begins = tf.cumsum(blocks.count, exclusive=True)
    blocks = blocks._replace(skip=tf.maximum(num_records - begins, 0))
    return blocks.rows(tf.where(begins + blocks.count > num_records)[:, 0])
