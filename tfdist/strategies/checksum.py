"""Numbers that tell batches apart, to see that all workers are fed the same ones."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_PRIME = 2_147_483_647


def checksum(batch: Any) -> tf.Tensor:
    """Returns a number, int64 from 0, that tells batches of different rows apart.

    Made from the first and last row of each tensor: cheap, and rows shuffled otherwise change it.

    Args:
        batch: Nested tensors with rows along axis 0, of which a leaf may be None.
    """
    result = tf.constant(0, tf.int64)
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if leaf is None:
            continue
        rows = tf.concat([leaf[:1], leaf[-1:]], 0) if leaf.shape.rank else leaf
        bits = tf.cast(_bits(tf.reshape(rows, [-1])), tf.int64)
        places = tf.range(1, tf.size(bits, tf.int64) + 1, dtype=tf.int64)
        result = mixed(result, tf.reduce_sum(tf.math.floormod(bits * places, _PRIME)))
    return result


def mixed(checksum: tf.Tensor, other: Any) -> tf.Tensor:
    """Returns the checksum of one thing after another, int64 from 0."""
    return tf.math.floormod(checksum * 31 + tf.cast(other, tf.int64), _PRIME)


def _bits(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(tensor, _PRIME)
    if tensor.dtype.is_floating:
        return tf.bitcast(tf.cast(tensor, tf.float32), tf.int32)
    return tensor
