"""Exchanges among workers of tensors whose size differs from step to step.

TensorFlow fixes the size of a collective operation at its first use, and a loop in the graph uses
one for all its steps: a last batch of fewer rows stops it. Here the size is part of the
operation's keys, so that each size is an operation of its own.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.strategies.collectives.end_to_end import padded
from tfdist.upstream.tensorflow_workers import exchanged_by_key

#: Beyond the keys that `tf.distribute` gives to groups of devices; it counts from 1.
_FIRST_GROUP = 1 << 20
#: Operations and sizes that have one group key; the next have the next. Both in one int32, and few
#: groups, for NCCL connects the devices anew for each.
_OPERATIONS_A_GROUP, _SIZES_A_GROUP = 1 << 9, 1 << 22
#: Of sizes, which are an int32, too.
_SIZE_GROUPS = (1 << 31) // _SIZES_A_GROUP
#: With the last one the group key is the last int32.
MOST_OPERATIONS = ((1 << 31) - _FIRST_GROUP) // _SIZE_GROUPS * _OPERATIONS_A_GROUP

#: Numbers the groups of operations of the program, each of one strategy object: TensorFlow keeps a
#: key, and who belongs to its group, for as long as it runs.
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
        """Sums a tensor, or lays slices of an embedding's gradient end to end.

        Args:
            tensor: Of the same size on every replica, but for the number of slices.
            index: The replica's number among all.
            op: `"SUM"` or `"MEAN"`.

        Raises:
            ConfigurationError: The program has more such sums than there are keys.
        """
        if isinstance(tensor, tf.IndexedSlices):
            values, indices = self._end_to_end([tensor.values, tensor.indices], index)
            values = values / self._num_replicas if op == "MEAN" else values
            return tf.IndexedSlices(values, indices, tensor.dense_shape)
        total = self._sum(tensor, index)
        return total / self._num_replicas if op == "MEAN" else total

    def gather(self, vector: tf.Tensor, index: int) -> tf.Tensor:
        """Lays vectors of all replicas end to end, in an order that TensorFlow chooses.

        Args:
            vector: Of numbers, as many on every replica.
            index: The replica's number among all.

        Raises:
            ConfigurationError: As of `reduce`.
        """
        return self._exchanged("lay end to end", vector, index)

    def _end_to_end(self, tensors: list[tf.Tensor], index: int) -> list[tf.Tensor]:
        """Lays tensors of all replicas end to end, as sums with zeros in the others' places."""

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
