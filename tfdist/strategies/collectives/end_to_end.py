"""Tensors of all replicas laid end to end, by sums: each adds zeros in the others' places."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def padded(
    tensors: list[tf.Tensor], index: int, num_replicas: int, all_reduce: Callable[[list], list]
) -> list[tf.Tensor]:
    """Returns tensors with as many rows as all replicas have, zeros but for their own.

    Args:
        tensors: Numbers, of as many rows each.
        index: The replica's number among all.
        num_replicas: Over all workers.
        all_reduce: Sums tensors over the replicas.
    """
    own = tf.shape(tensors[0])[0]
    rows = all_reduce([tf.one_hot(index, num_replicas, own, dtype=tf.int32)])[0]
    before = tf.reduce_sum(rows[:index])
    after = tf.reduce_sum(rows) - before - own
    return [tf.pad(t, [[before, after]] + [[0, 0]] * (t.shape.rank - 1)) for t in tensors]
