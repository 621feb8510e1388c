"""Gradient buckets: overlaps the all-reduce of gradients with the backward pass.

A backward pass produces the gradients of the last layers first. A single all-reduce of all
gradients has to wait for the first layer, while the network is idle. A bucket is all-reduced as
soon as its gradients are available (S. Li et al., PyTorch Distributed, VLDB 2020, section 3.2.3).

If gradients are computed faster than they are sent, they accumulate in memory in addition to the
buffers for the sums. A model with many weights and few rows would store all gradients twice.
Therefore the backward pass waits for the network, as in PyTorch's FSDP (Zhao et al., PyTorch FSDP,
VLDB 2023, section 3.4: rate limiter).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.upstream.tensorflow_graphs import Dependencies, run_after

T = TypeVar("T")
S = TypeVar("S")

#: The automatic bucket size: an eighth of all gradients, so that little communication remains after
#: the backward pass; at least 1 MB, below which latency dominates; and at most 25 MB (PyTorch's
#: size), above which latency is negligible.
_PART, _SMALLEST, _LARGEST = 8, 1 << 20, 25 << 20
#: Number of buckets in flight that the rate limit always allows: one is computed, one is sent.
_BUCKETS_IN_FLIGHT = 2
_WIRE_DTYPES = MappingProxyType({"fp16": tf.float16, "bf16": tf.bfloat16})


@dataclass
class GradientExchange:
    """How gradients are sent between processes.

    Attributes:
        bucket_bytes: The largest size of a gradient bucket in bytes; `"auto"`: by the size of all
            gradients; None: one bucket.
        wire_dtype: The number format in which gradients are sent; None: their own.
    """

    bucket_bytes: int | str | None = None
    wire_dtype: tf.DType | None = None

    @classmethod
    def from_options(cls, compression: str, bucket_mb: float | str) -> GradientExchange:
        """Returns the exchange that options of a strategy ask for.

        Args:
            compression: `"fp16"` or `"bf16"` halves what is sent, and rounds it; `"none"` keeps the
                numbers of one device.
            bucket_mb: Megabytes of a gradient bucket, sent while the backward pass continues;
                `"auto"`: by the size of all gradients; `"all"`: one bucket.

        Raises:
            ConfigurationError: `bucket_mb` is not a size.
        """
        wire_dtype = _WIRE_DTYPES.get(compression)
        if bucket_mb in ("all", "auto"):
            return cls(None if bucket_mb == "all" else "auto", wire_dtype)
        if isinstance(bucket_mb, (int, float)) and bucket_mb > 0:
            return cls(int(bucket_mb * (1 << 20)), wire_dtype)
        raise ConfigurationError(
            f"bucket_mb={bucket_mb!r}: expected megabytes above 0, 'auto' or 'all'."
        )

    def inexact(self) -> dict[str, str]:
        """Returns what does not match one device, and why."""
        if self.wire_dtype is None:
            return {}
        return {"compression": f"gradients are sent between workers as {self.wire_dtype.name}"}


def in_order(gradients: Mapping[int, Any], num_bytes: int | str | None) -> list[list[int]]:
    """Assigns gradients to buckets in the order in which a backward pass produces them.

    Args:
        gradients: Dense tensors or `tf.IndexedSlices` by index, with the same shapes on every
            replica.
        num_bytes: Maximum size of a bucket with several gradients, in bytes; `"auto"`: derived from
            the size of all gradients; None: one bucket.

    Returns:
        The indices in each bucket, the same on every replica; at least one bucket.
    """
    total = sum(map(_size, gradients.values()))
    limit = _fitting(total) if isinstance(num_bytes, str) else num_bytes
    if limit is None or total <= limit:
        return [sorted(gradients, reverse=True)]
    # A tape adds operations to a graph in an order in which they can run. It is the same on all
    # workers that run the same program.
    indices = sorted(gradients, reverse=True)
    if not tf.executing_eagerly():
        operations = tf.compat.v1.get_default_graph().get_operations()
        created = {operation.name: number for number, operation in enumerate(operations)}
        indices.sort(key=lambda i: created.get(_values(gradients[i]).op.name, 0))
    return consecutive(indices, [_size(gradients[i]) for i in indices], limit)


def consecutive(items: Sequence[T], sizes: Sequence[int], num_bytes: int | str) -> list[list[T]]:
    """Assigns items to buckets, in their order."""
    limit = _fitting(sum(sizes)) if isinstance(num_bytes, str) else num_bytes
    buckets: list[list[T]] = []
    bucket_size = 0
    for item, size in zip(items, sizes, strict=True):
        if not buckets or bucket_size + size > limit:
            buckets.append([])
            bucket_size = 0
        buckets[-1].append(item)
        bucket_size += size
    return buckets


def each(
    reduce: Callable[[T], S], buckets: Sequence[T], num_bytes: int | str | None, wait: bool
) -> list[S]:
    """Applies `reduce` to each bucket separately.

    Two of the largest buckets may be in flight at a time: see `limit_rate`.

    Args:
        reduce: Sums a structure of tensors over the replicas.
        buckets: Such structures, in the order of the backward pass.
        num_bytes: As for `in_order`.
        wait: Whether each bucket waits until the previous one has been reduced: see
            `ProcessGroup.sums_in_order`.
    """
    results: list[S] = []
    for bucket in buckets:
        before = tf.nest.flatten(results[-1:], expand_composites=True) if wait else []
        with tf.control_dependencies(before):
            results.append(reduce(bucket))
    limit_rate(buckets, results, 2 * (num_bytes if isinstance(num_bytes, int) else _LARGEST))
    return results


def by_index(order: Sequence[Sequence[int]], results: Sequence[Sequence[S]]) -> dict[int, S]:
    """Returns the results of buckets by the index of the gradient."""
    pairs = zip(itertools.chain(*order), itertools.chain(*results), strict=True)
    return dict(sorted(pairs, key=operator.itemgetter(0)))


def _fitting(num_bytes: int) -> int:
    return min(max(num_bytes // _PART, _SMALLEST), _LARGEST)


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _size(gradient: Any) -> int:
    """Returns the bytes of a dense gradient; 0 for slices, whose number depends on the batch."""
    return 0 if isinstance(gradient, tf.IndexedSlices) else size_of(gradient)


# ---- rate limit ----


def limit_rate(gradients: Sequence[Any], sums: Sequence[Any], num_bytes: int) -> None:
    """Makes the computation of each bucket wait until all but the last few have been reduced.

    Called on each replica after the sums have been traced. Only operations that no earlier sum
    depends on wait, so that there are no cycles.

    Args:
        gradients: This replica's gradients in the order of the backward pass, a structure of
            tensors per bucket.
        sums: The sums over the replicas, per bucket.
        num_bytes: Maximum number of bytes that are computed, but not reduced yet. At least two
            buckets are always allowed, because a lower limit would add the latency of each
            all-reduce.
    """
    sizes = [sum(map(size_of, _tensors(bucket))) for bucket in gradients]
    if tf.executing_eagerly() or sum(sizes) <= num_bytes:
        return
    operations = Dependencies(tf.compat.v1.get_default_graph())
    reduced: set[tf.Operation] = set()
    for number, bucket in enumerate(gradients):
        last = number - _BUCKETS_IN_FLIGHT
        while last >= 0 and sum(sizes[last + 1 : number + 1]) < num_bytes:
            last -= 1
        if last >= 0:
            new = operations.needed([tensor.op for tensor in _tensors(bucket)], reduced)
            run_after(operations.first(new), _tensors(sums[last]))
        reduced |= operations.needed([tensor.op for tensor in _tensors(sums[number])], reduced)


def _tensors(structure: Any) -> list[tf.Tensor]:
    return tf.nest.flatten(structure, expand_composites=True)


def size_of(tensor: tf.Tensor) -> int:
    """Returns the bytes of a tensor; 0 if its shape is unknown."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size
