"""Gradient buckets: which gradients are exchanged together while the backward pass continues.

A backward pass produces the gradients one after the other, those of the last layers first.
Exchanged all at once they wait for the first layer's, and the network idles meanwhile. In buckets
each is sent as soon as its own gradients are there (S. Li et al., PyTorch Distributed, VLDB 2020,
section 3.2.3).

If gradients come faster than they are sent, they pile up next to the memory reserved for their
sums, and a model with many weights and few rows would hold them all twice. So the backward pass
waits for the network, as PyTorch's FSDP does for its weights (Zhao et al., PyTorch FSDP, VLDB 2023,
section 3.4: rate limiter).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfdist.upstream.tensorflow_graphs import in_order_of_effects, run_after

T = TypeVar("T")
S = TypeVar("S")

#: The automatic size of a bucket: an eighth of all gradients, so that little is left to send after
#: the backward pass, but at least 1 MB, below which latency dominates, and at most 25 MB (PyTorch's
#: size), where latency no longer matters.
_PART, _SMALLEST, _LARGEST = 8, 1 << 20, 25 << 20
#: Buckets in flight that the rate limit always allows: one is computed while one is sent.
_BUCKETS_IN_FLIGHT = 2


def in_order(gradients: Mapping[int, Any], num_bytes: int | str | None) -> list[list[int]]:
    """Assigns gradients to buckets in the order in which a backward pass produces them.

    Args:
        gradients: By index: dense tensors or `tf.IndexedSlices`, of the same shapes on every
            replica.
        num_bytes: The largest size of a bucket of several gradients; `"auto"`: depends on the size
            of all gradients; None: one bucket.

    Returns:
        The indices in each bucket, the same on every replica; at least one bucket.
    """
    total = sum(map(_size, gradients.values()))
    most = _fitting(total) if isinstance(num_bytes, str) else num_bytes
    if most is None or total <= most:
        return [sorted(gradients, reverse=True)]
    places = _by_readiness(gradients)
    sizes = [_size(gradients[i]) for i in places]
    buckets: list[list[int]] = [[]]
    held = 0
    for place, size in zip(places, sizes, strict=True):
        if buckets[-1] and held + size > most:
            buckets.append([])
            held = 0
        buckets[-1].append(place)
        held += size
    return buckets


def each(
    reduce: Callable[[T], S], buckets: Sequence[T], num_bytes: int | str | None, wait: bool
) -> list[S]:
    """Applies `reduce` to each bucket, as an exchange of its own.

    Two of the largest buckets may be in flight at a time: see `limit_rate`.

    Args:
        reduce: Sums a structure of tensors over the replicas.
        buckets: Such structures, in the order of the backward pass.
        num_bytes: As for `in_order`.
        wait: Whether each bucket waits until the one before it has been exchanged: see
            `ProcessGroup.sums_in_order`.
    """
    results: list[S] = []
    for bucket in buckets:
        before = tf.nest.flatten(results[-1:], expand_composites=True) if wait else []
        with tf.control_dependencies(before):
            results.append(reduce(bucket))
    limit_rate(buckets, results, 2 * (num_bytes if isinstance(num_bytes, int) else _LARGEST))
    return results


def by_place(order: Sequence[Sequence[int]], results: Sequence[Sequence[S]]) -> dict[int, S]:
    """Returns the results of buckets by the index of the gradient."""
    pairs = zip(itertools.chain(*order), itertools.chain(*results), strict=True)
    return dict(sorted(pairs, key=operator.itemgetter(0)))


def _fitting(num_bytes: int) -> int:
    return min(max(num_bytes // _PART, _SMALLEST), _LARGEST)


def _by_readiness(gradients: Mapping[int, Any]) -> list[int]:
    """Orders indices by when the tape produced the gradients; eagerly, from the last to the first.

    A tape walks back through what it recorded, so the order in which it adds operations to a graph
    is one in which they can run. Workers that run one program record the same.
    """
    places = sorted(gradients, reverse=True)
    if tf.executing_eagerly():
        return places
    operations = tf.compat.v1.get_default_graph().get_operations()
    created = {operation.name: number for number, operation in enumerate(operations)}
    return sorted(places, key=lambda i: created.get(_values(gradients[i]).op.name, 0))


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _size(gradient: Any) -> int:
    """Returns the bytes of a dense gradient; 0 for slices, whose number depends on the batch."""
    if isinstance(gradient, tf.IndexedSlices) or not gradient.shape.is_fully_defined():
        return 0
    return math.prod(gradient.shape) * gradient.dtype.size


# ---- rate limit ----


def limit_rate(gradients: Sequence[Any], sums: Sequence[Any], num_bytes: int) -> None:
    """Makes the computation of each bucket wait until all but the last few have been exchanged.

    Called on each replica when the sums have been traced. Only operations that no earlier sum needs
    wait, so that nothing waits for itself.

    Args:
        gradients: This replica's gradients in the order of the backward pass, a structure of
            tensors per bucket.
        sums: The sums over the replicas, per bucket.
        num_bytes: Bytes that may be computed and not exchanged yet, if these are more than two
            buckets. Waiting for fewer would cost the latency of each exchange.
    """
    sizes = [sum(map(_num_bytes, _tensors(bucket))) for bucket in gradients]
    if tf.executing_eagerly() or sum(sizes) <= num_bytes:
        return
    operations = _Dependencies(tf.compat.v1.get_default_graph())
    crossed: set[tf.Operation] = set()
    for number, bucket in enumerate(gradients):
        last = number - _BUCKETS_IN_FLIGHT
        while last >= 0 and sum(sizes[last + 1 : number + 1]) < num_bytes:
            last -= 1
        if last >= 0:
            new = operations.needed(bucket, crossed)
            run_after(operations.first(new), _tensors(sums[last]))
        crossed |= operations.needed(sums[number], crossed)


class _Dependencies:
    """The operations that those of a graph wait for."""

    def __init__(self, graph: tf.Graph) -> None:
        self._in_order = in_order_of_effects(graph)

    def needed(self, structure: Any, known: set[tf.Operation]) -> set[tf.Operation]:
        """Returns the operations that tensors need, except the known ones and what those need."""
        found: set[tf.Operation] = set()
        left = [tensor.op for tensor in _tensors(structure)]
        while left:
            operation = left.pop()
            if operation not in found and operation not in known:
                found.add(operation)
                left += self._of(operation)
        return found

    def first(self, operations: set[tf.Operation]) -> list[tf.Operation]:
        """Returns those that all others depend on, without constants, which hold little."""
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
