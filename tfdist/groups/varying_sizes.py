"""Exchanges of tensors whose size differs from step to step.

TensorFlow fixes the size of a collective operation at its first use, and a loop in the graph uses
one operation for all its steps, so a smaller last batch would stop it. Here the size is part of the
operation's keys, so that each size is an operation of its own.
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
#: Operations and sizes per group key. Both fit into one int32, with few groups, because NCCL
#: connects the devices again for each.
_OPERATIONS_A_GROUP, _SIZES_A_GROUP = 1 << 9, 1 << 22
#: Groups of sizes, which are an int32, too.
_SIZE_GROUPS = (1 << 31) // _SIZES_A_GROUP
#: The last operation has the largest int32 as its group key.
MOST_OPERATIONS = ((1 << 31) - _FIRST_GROUP) // _SIZE_GROUPS * _OPERATIONS_A_GROUP

#: Numbers the blocks of operations of the program, each of one object: TensorFlow keeps a group key
#: and its members as long as the process runs.
_blocks = itertools.count()


class VaryingSizes:
    """Sums and gathers on the replicas of a strategy, in a graph.

    Args:
        tokens: One for each replica of this process, on its device. Collectives of a device run
            in the order in which they were traced if they use the same token; without one they
            run in any order, or not at all where only another replica's result is used.
        first_replica: Index, among all replicas, of the first one of this process.
        num_replicas: Over all workers.
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
        # Counted on each replica by itself: all workers build the same graphs in the same order.
        self._counts: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)
        self._blocks: list[int] = []

    def reduce(
        self, tensor: tf.Tensor | tf.IndexedSlices, index: int, op: str = "SUM"
    ) -> tf.Tensor | tf.IndexedSlices:
        """Sums a tensor, or concatenates the slices of a sparse gradient.

        Args:
            tensor: Has the same size on every replica, except for the number of slices.
            index: The replica's number among all.
            op: `"SUM"` or `"MEAN"`.

        Raises:
            ConfigurationError: The program has more such operations than there are keys.
        """
        if isinstance(tensor, tf.IndexedSlices):
            values, indices = self._end_to_end([tensor.values, tensor.indices], index)
            values = values / self._num_replicas if op == "MEAN" else values
            return tf.IndexedSlices(values, indices, tensor.dense_shape)
        total = self._sum(tensor, index)
        return total / self._num_replicas if op == "MEAN" else total

    def gather(self, vector: tf.Tensor, index: int) -> tf.Tensor:
        """Concatenates the vectors of all replicas, in an order that TensorFlow chooses.

        Args:
            vector: A vector of the same length on every replica.
            index: The replica's number among all.

        Raises:
            ConfigurationError: As of `reduce`.
        """
        return self._exchanged("concatenate", vector, index)

    def _end_to_end(self, tensors: list[tf.Tensor], index: int) -> list[tf.Tensor]:
        """Concatenates the tensors of all replicas, as sums with zeros for the others' rows."""

        def sums(own: list[tf.Tensor]) -> list[tf.Tensor]:
            return [self._sum(tensor, index) for tensor in own]

        return sums(padded(tensors, index, self._num_replicas, sums))

    def _sum(self, tensor: tf.Tensor, index: int) -> tf.Tensor:
        flat = self._exchanged("sum", tf.reshape(tensor, [-1]), index)
        return tf.reshape(flat, tf.shape(tensor))

    def _exchanged(self, operation: str, vector: tf.Tensor, index: int) -> tf.Tensor:
        # The operation itself refuses a tensor of more than 2^31 - 1 elements; `tf.size`, where the
        # shape is known, does not. An assertion is no way: it is put in an order with the sums of
        # other replicas, which wait for this one.
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
        """The number of a replica's next operation, the same as on the other replicas."""
        block, number = divmod(next(self._counts[index]), _OPERATIONS_A_GROUP)
        if block == len(self._blocks):
            self._blocks.append(next(_blocks))
        return self._blocks[block] * _OPERATIONS_A_GROUP + number


def keys(operation: int, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the keys of a group and of an operation within it, int32: no other pair has them.

    Args:
        operation: Its number in the program, from 0.
        size: Elements of its tensor, int32.

    Raises:
        ConfigurationError: A number beyond the range of the keys.
    """
    if operation >= MOST_OPERATIONS:
        raise ConfigurationError(
            f"This program has built {MOST_OPERATIONS} sums of tensors of varying size, and "
            "TensorFlow has no keys for more: start a new process."
        )
    block, number = divmod(operation, _OPERATIONS_A_GROUP)
    group = _FIRST_GROUP + block * _SIZE_GROUPS + size // _SIZES_A_GROUP
    return group, number * _SIZES_A_GROUP + size % _SIZES_A_GROUP


def padded(
    tensors: list[tf.Tensor], index: int, num_replicas: int, all_reduce: Callable[[list], list]
) -> list[tf.Tensor]:
    """Pads tensors with zeros to the rows of all replicas, so that their sum concatenates them.

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
