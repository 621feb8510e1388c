"""Collectives for tensors whose size differs between steps.

TensorFlow fixes the tensor size of a collective at its first use. A loop in a graph uses the same
operation in all steps, so a smaller last batch would fail. Here the size is part of the operation's
keys, so that each size is a separate collective.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.upstream.tensorflow_runtime import exchanged_by_key

#: Larger than the group keys that `tf.distribute` assigns, which count from 1.
_FIRST_GROUP = 1 << 20
#: Operations and sizes per group key. Both are encoded in one int32. There are few groups, because
#: NCCL creates a new communicator for each.
_OPERATIONS_A_GROUP, _SIZES_A_GROUP = 1 << 9, 1 << 22
#: Number of groups for an int32 size.
_SIZE_GROUPS = (1 << 31) // _SIZES_A_GROUP
#: The last operation has the largest int32 as its group key.
MAX_OPERATIONS = ((1 << 31) - _FIRST_GROUP) // _SIZE_GROUPS * _OPERATIONS_A_GROUP

#: Numbers the blocks of operations in this process. A block belongs to one object, because
#: TensorFlow keeps the members of a group key until the process ends.
_blocks = itertools.count()


class VaryingSizes:
    """Sums and gathers on the replicas of a strategy, in a graph.

    Args:
        tokens: One variable per replica of this process, on its device. Collectives with the same
            token run in the order in which they were traced. Without a token, they run in any
            order, or are pruned if only another replica's result is used.
        first_replica: Index, among all replicas, of the first one of this process.
        num_replicas: Number of replicas of all workers.
        communication: `"ring"` or `"nccl"`.
    """

    def __init__(
        self,
        tokens: Sequence[tf.Variable],
        first_replica: int,
        num_replicas: int,
        communication: str,
    ) -> None:
        self._num_replicas, self._communication = num_replicas, communication
        self._tokens = dict(enumerate(tokens, first_replica))
        # Counted per replica, because all workers build the same graphs in the same order.
        self._counts: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)
        self._blocks: list[int] = []

    def reduce(
        self, tensor: tf.Tensor | tf.IndexedSlices, index: int
    ) -> tf.Tensor | tf.IndexedSlices:
        """Sums a tensor, or concatenates the slices of a sparse gradient.

        Args:
            tensor: Has the same size on every replica, except for the number of slices.
            index: The replica's index among all replicas.

        Raises:
            ConfigurationError: The process has more such operations than there are keys.
        """
        if isinstance(tensor, tf.IndexedSlices):
            values, indices = self._concatenated([tensor.values, tensor.indices], index)
            return tf.IndexedSlices(values, indices, tensor.dense_shape)
        return self._sum(tensor, index)

    def gather(self, vector: tf.Tensor, index: int) -> tf.Tensor:
        """Concatenates the vectors of all replicas, in an order that TensorFlow chooses.

        Raises:
            ConfigurationError: As in `reduce`.
        """
        return self._exchanged("concatenate", vector, index)

    def _concatenated(self, tensors: list[tf.Tensor], index: int) -> list[tf.Tensor]:
        """Concatenates the tensors of all replicas, by summing tensors padded with zeros."""

        def sums(local: list[tf.Tensor]) -> list[tf.Tensor]:
            return [self._sum(tensor, index) for tensor in local]

        return sums(padded(tensors, index, self._num_replicas, sums))

    def _sum(self, tensor: tf.Tensor, index: int) -> tf.Tensor:
        flat = self._exchanged("sum", tf.reshape(tensor, [-1]), index)
        return tf.reshape(flat, tf.shape(tensor))

    def _exchanged(self, operation: str, vector: tf.Tensor, index: int) -> tf.Tensor:
        # The `Size` operation raises an error for more than 2^31 - 1 elements, which `tf.size` does
        # not if the shape is known. An assertion would be ordered after the sums of other replicas,
        # which wait for this one.
        size = tf.raw_ops.Size(input=vector)
        return exchanged_by_key(
            operation,
            vector,
            self._num_replicas,
            keys(self._next_operation(index), size),
            self._communication,
            self._tokens[index],
        )

    def _next_operation(self, index: int) -> int:
        """Returns the number of the next operation, which is the same on all replicas."""
        block, number = divmod(next(self._counts[index]), _OPERATIONS_A_GROUP)
        if block == len(self._blocks):
            self._blocks.append(next(_blocks))
        return self._blocks[block] * _OPERATIONS_A_GROUP + number


def keys(operation: int, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the unique keys of a group and of an operation within it, int32.

    Raises:
        ConfigurationError: The number of operations exceeds the range of keys.
    """
    if operation >= MAX_OPERATIONS:
        raise ConfigurationError(
            f"This process has built {MAX_OPERATIONS} collectives for tensors of varying size, and "
            "TensorFlow has no keys for more. Start a new process."
        )
    block, number = divmod(operation, _OPERATIONS_A_GROUP)
    group = _FIRST_GROUP + block * _SIZE_GROUPS + size // _SIZES_A_GROUP
    return group, number * _SIZES_A_GROUP + size % _SIZES_A_GROUP


def padded(
    tensors: list[tf.Tensor], index: int, num_replicas: int, all_reduce: Callable[[list], list]
) -> list[tf.Tensor]:
    """Pads tensors with zeros to the rows of all replicas, so that their sum concatenates them."""
    num_rows = tf.shape(tensors[0])[0]
    rows = all_reduce([tf.one_hot(index, num_replicas, num_rows, dtype=tf.int32)])[0]
    before = tf.reduce_sum(rows[:index])
    after = tf.reduce_sum(rows) - before - num_rows
    return [tf.pad(t, [[before, after]] + [[0, 0]] * (t.shape.rank - 1)) for t in tensors]
