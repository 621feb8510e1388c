"""Sums over workers of tensors whose size differs from step to step.

TensorFlow fixes the size of a collective operation at its first use, and a loop in the graph uses
one for all its steps: a last batch of fewer rows stops it. Here the size is part of the
operation's key, so that each size is an operation of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.python.ops import collective_ops

#: Beyond the keys that `tf.distribute` gives to groups of devices; it counts from 1.
_GROUP_KEY = 1 << 20
#: What the key of an operation is made of, an int32: its number, which tells those of one step
#: apart and begins anew after so many; its dtype; its size, modulo this.
_OPERATIONS, _SIZES = 100, 1 << 22
_DTYPES = (tf.float32, tf.int32, tf.int64, tf.float64, tf.float16)


class AnySize:
    """All-reduces on the replicas of a strategy, in a graph.

    Args:
        devices: TensorFlow's names of those of this process.
        first_replica: The number, among all replicas, of the one on the first device.
        num_replicas: Over all workers.
        communication: `"ring"` or `"nccl"`.
    """

    def __init__(
        self, devices: Sequence[str], first_replica: int, num_replicas: int, communication: str
    ) -> None:
        self._num_replicas, self._communication = num_replicas, communication
        # What a function's operations on a device have in common: without one they run in any
        # order, or not at all where only another replica's sum is used.
        self._tokens: dict[int, tf.Variable] = {}
        for index, device in enumerate(devices, first_replica):
            with tf.device(device):
                self._tokens[index] = tf.Variable(0.0, trainable=False)
        # Counted on each replica by itself: all workers build the same graphs in the same order.
        self._operations: dict[int, Iterator[int]] = {}

    def reduce(
        self, tensor: tf.Tensor | tf.IndexedSlices, index: int, op: str = "SUM"
    ) -> tf.Tensor | tf.IndexedSlices:
        """Sums a tensor, or lays slices of an embedding's gradient end to end.

        Args:
            tensor: Of the same size on every replica, but for the number of slices.
            index: The replica's number among all.
            op: `"SUM"` or `"MEAN"`.
        """
        if isinstance(tensor, tf.IndexedSlices):
            values, indices = self._end_to_end([tensor.values, tensor.indices], index)
            values = values / self._num_replicas if op == "MEAN" else values
            return tf.IndexedSlices(values, indices, tensor.dense_shape)
        total = self._sum(tensor, index)
        return total / self._num_replicas if op == "MEAN" else total

    def _end_to_end(self, tensors: list[tf.Tensor], index: int) -> list[tf.Tensor]:
        """Lays tensors of all replicas end to end, as sums with zeros in the others' places."""
        own = tf.shape(tensors[0])[0]
        rows = self._sum(tf.one_hot(index, self._num_replicas, own, dtype=tf.int32), index)
        before = tf.reduce_sum(rows[:index])
        after = tf.reduce_sum(rows) - before - own
        padded = [tf.pad(t, [[before, after]] + [[0, 0]] * (t.shape.rank - 1)) for t in tensors]
        return [self._sum(p, index) for p in padded]

    def _sum(self, tensor: tf.Tensor, index: int) -> tf.Tensor:
        number = next(self._operations.setdefault(index, itertools.count()))
        kind = number % _OPERATIONS * len(_DTYPES) + _DTYPES.index(tensor.dtype)
        size = tf.math.floormod(tf.size(tensor), _SIZES)
        flat = collective_ops.all_reduce_v2(
            tf.reshape(tensor, [-1]),
            group_size=self._num_replicas,
            group_key=_GROUP_KEY,
            instance_key=kind * _SIZES + size,
            communication_hint=self._communication,
            ordering_token=self._tokens[index].handle,
        )
        return tf.reshape(flat, tf.shape(tensor))
