"""Lets a backward pass wait for the network before it makes more gradients than are to be held.

Gradients that come faster than they are sent pile up, beside the sums for which there is room by
then: a model of many weights and few rows would hold them all, twice. PyTorch's FSDP holds its
weights back in this manner (Zhao et al., PyTorch FSDP, VLDB 2023, section 3.4: rate limiter).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.upstream.tensorflow_graphs import in_order_of_effects, run_after

#: Buckets of which one is made while one crosses.
_LEAST = 2


def limit(gradients: Sequence[Any], sums: Sequence[Any], num_bytes: int) -> None:
    """Has each bucket be made when all but the last few before it have crossed.

    Called when the sums are traced, on each replica. What waits is what no earlier sum needs, so
    that nothing waits for itself.

    Args:
        gradients: Of this replica, in the order of the backward pass: a structure of tensors a
            bucket.
        sums: Over the replicas, of each bucket.
        num_bytes: That may be made and not have crossed, or else two buckets. Fewer are not held
            back, which would cost the latency of each exchange.
    """
    sizes = [sum(map(_num_bytes, _tensors(bucket))) for bucket in gradients]
    if tf.executing_eagerly() or sum(sizes) <= num_bytes:
        return
    operations = _Before(tf.compat.v1.get_default_graph())
    crossed: set[tf.Operation] = set()
    for number, bucket in enumerate(gradients):
        last = number - _LEAST
        while last >= 0 and sum(sizes[last + 1 : number + 1]) < num_bytes:
            last -= 1
        if last >= 0:
            new = operations.needed(bucket, crossed)
            run_after(operations.first(new), _tensors(sums[last]))
        crossed |= operations.needed(sums[number], crossed)


class _Before:
    """What operations of a graph wait for."""

    def __init__(self, graph: tf.Graph) -> None:
        self._in_order = in_order_of_effects(graph)

    def needed(self, structure: Any, known: set[tf.Operation]) -> set[tf.Operation]:
        """Returns the operations that tensors need beyond the known ones, which need no other."""
        found: set[tf.Operation] = set()
        left = [tensor.op for tensor in _tensors(structure)]
        while left:
            operation = left.pop()
            if operation not in found and operation not in known:
                found.add(operation)
                left += self._of(operation)
        return found

    def first(self, operations: set[tf.Operation]) -> list[tf.Operation]:
        """Returns those for which all others have to wait, but for constants, which hold little."""
        waiting = {operation for operation in operations if self._of(operation)}
        return [operation for operation in waiting if waiting.isdisjoint(self._of(operation))]

    def _of(self, operation: tf.Operation) -> list[tf.Operation]:
        inputs = (tensor.op for tensor in operation.inputs)
        return [*inputs, *operation.control_inputs, *self._in_order.get(operation, [])]


def _tensors(structure: Any) -> list[tf.Tensor]:
    return tf.nest.flatten(structure, expand_composites=True)


def _num_bytes(tensor: tf.Tensor) -> int:
    """Bytes of a tensor; 0 where its shape is not known."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size
