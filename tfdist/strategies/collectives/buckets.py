"""Which gradients cross the replicas together, so that the first leave before the last are there.

The gradients of a backward pass are there one after the other, those of the last layers first.
Summed all at once they wait for the first layer's, and the network idles meanwhile; in buckets each
leaves when its own are there (S. Li et al., PyTorch Distributed, VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfdist.strategies.collectives import rate_limit

T = TypeVar("T")
S = TypeVar("S")

#: Of a bucket whose size nobody chose: an eighth of the gradients, so that little is left to send
#: after the backward pass, but within bounds: a sum of less costs its latency, and of 25 MB (what
#: PyTorch takes) the latency is no part any more.
_PART, _LEAST, _MOST = 8, 1 << 20, 25 << 20


def in_order(gradients: Mapping[int, Any], num_bytes: int | str | None) -> list[list[int]]:
    """Divides gradients into buckets in the order in which a backward pass has them.

    Args:
        gradients: By place: dense tensors or `tf.IndexedSlices`, of the same on every replica.
        num_bytes: Of a bucket, at most, if it holds several; `"auto"`: by how much there is; None:
            all are in one.

    Returns:
        The places in each bucket, the same on every replica; one bucket at least.
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
    """Applies `reduce` to buckets, each in an exchange of its own.

    Two of the largest may be on their way: see `rate_limit`.

    Args:
        reduce: Sums a structure of tensors over the replicas.
        buckets: Such structures, in the order of the backward pass.
        num_bytes: What `in_order` was told.
        wait: Whether to each when the one before has crossed, where what is there at the same time
            would be laid into one exchange, by chance of when it came: sums of three ranks or more
            depend on where a number lies in it, and waiting keeps runs equal to the bit.
    """
    results: list[S] = []
    for bucket in buckets:
        before = tf.nest.flatten(results[-1:], expand_composites=True) if wait else []
        with tf.control_dependencies(before):
            results.append(reduce(bucket))
    rate_limit.limit(buckets, results, 2 * (num_bytes if isinstance(num_bytes, int) else _MOST))
    return results


def by_place(order: Sequence[Sequence[int]], results: Sequence[Sequence[S]]) -> dict[int, S]:
    """Returns what came of buckets, each in the order of its places, by place."""
    pairs = zip(itertools.chain(*order), itertools.chain(*results), strict=True)
    return dict(sorted(pairs, key=operator.itemgetter(0)))


def _fitting(num_bytes: int) -> int:
    return min(max(num_bytes // _PART, _LEAST), _MOST)


def _by_readiness(gradients: Mapping[int, Any]) -> list[int]:
    """Orders places by when the tape made the gradients, the last layers' first where it is one.

    A tape walks back through what it recorded: the order in which it adds operations to a graph is
    the one in which they can run. Workers that run one program record the same.
    """
    places = sorted(gradients, reverse=True)
    if tf.executing_eagerly():
        return places
    operations = tf.compat.v1.get_default_graph().get_operations()
    made = {operation.name: number for number, operation in enumerate(operations)}
    return sorted(places, key=lambda i: made.get(_values(gradients[i]).op.name, 0))


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _size(gradient: Any) -> int:
    """Bytes of a dense gradient; 0 of slices, as many as the batch looks up."""
    if isinstance(gradient, tf.IndexedSlices) or not gradient.shape.is_fully_defined():
        return 0
    return math.prod(gradient.shape) * gradient.dtype.size
