"""What is drawn, as a function of seed, epoch and record alone: nothing is remembered."""

from __future__ import annotations

import tensorflow as tf

# One seed drives several draws; each begins from another number, or they would repeat each other.
OF_BLOCKS, OF_WINDOWS, OF_EXAMPLES, OF_BATCHES = 1, 2, 3, 4


def of_epoch(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """The seed of an epoch, int32 `(2,)`."""
    pair = tf.constant([seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF], tf.int32)
    return tf.random.experimental.stateless_fold_in(pair, epoch)


def of_examples(epoch_seed: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """The seed of each example, int32 `(..., 2)`: from the epoch's seed and the record's number.

    So an example is augmented the same way in an epoch whoever reads it, wherever it stands.
    """
    key = tf.random.experimental.stateless_fold_in(epoch_seed, OF_EXAMPLES)[0]
    numbers = tf.cast(numbers, tf.int32)
    return tf.stack([tf.broadcast_to(key, tf.shape(numbers)), numbers], axis=-1)


def of_batch(of_its_examples: tf.Tensor) -> tf.Tensor:
    """The seed of a batch, int32 `(2,)`: that of its first example, for draws of another kind."""
    return tf.random.experimental.stateless_fold_in(of_its_examples[0], OF_BATCHES)


def permutation(count: tf.Tensor, seed: tf.Tensor, of: tf.Tensor | int) -> tf.Tensor:
    """The numbers below `count` in an order drawn from a seed; `of` tells several draws apart."""
    seed = tf.random.experimental.stateless_fold_in(seed, of)
    return tf.random.experimental.stateless_shuffle(tf.range(count), seed)
