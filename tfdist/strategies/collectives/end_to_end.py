"""Tensors of all replicas laid end to end, by sums: each adds zeros in the others' places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import UnsupportedModelError


def end_to_end(
    structure: Any, index: int, num_replicas: int, all_reduce: Callable[[list], list]
) -> Any:
    """Returns the rows of all replicas, in their order, on each; called on a replica.

    Args:
        structure: Of dense tensors with this replica's rows along axis 0.
        index: The replica's number among all.
        num_replicas: Over all workers.
        all_reduce: Sums tensors over the replicas.

    Raises:
        UnsupportedModelError: A tensor has strings, or is ragged or sparse.
    """
    tensors = [leaf for leaf in tf.nest.flatten(structure) if leaf is not None]
    if any(t.dtype == tf.string or not isinstance(t, tf.Tensor) for t in tensors):
        raise UnsupportedModelError(
            "Dense numbers cross the workers, but an output holds strings, or is ragged or sparse: "
            "encode it before, or predict on one device."
        )
    numbers = [tf.cast(t, tf.int32) if t.dtype == tf.bool else t for t in tensors]
    wholes = all_reduce(padded(numbers, index, num_replicas, all_reduce))
    for whole, own in zip(wholes, tensors, strict=True):
        whole.set_shape([None, *own.shape[1:]])
    results = (tf.cast(w, own.dtype) for w, own in zip(wholes, tensors, strict=True))
    return tf.nest.map_structure(lambda leaf: leaf if leaf is None else next(results), structure)


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
