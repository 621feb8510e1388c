"""Sums over all replicas of structures of tensors; gradients in the format in which they cross."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.strategies.base import Strategy
from tfdist.strategies.collectives import buckets


def all_reduced(strategy: Strategy, structure: Any) -> Any:
    """Sums each tensor of a structure over all replicas, in one exchange; called on a replica."""
    return tf.nest.pack_sequence_as(structure, strategy.all_reduce(tf.nest.flatten(structure)))


def gradients_and(
    strategy: Strategy, gradients: Mapping[int, Any], rest: Any
) -> tuple[dict[int, Any], Any]:
    """Sums gradients over all replicas, bucket by bucket, and a structure with the last of them.

    Called on a replica.

    Args:
        strategy: Of the replicas; says how large buckets are, and in what format they cross.
        gradients: By place: dense tensors or `tf.IndexedSlices`; the same on every replica.
        rest: What is to be summed else.
    """
    wire = strategy.wire_dtype
    sent = {i: g if wire is None else tf.cast(g, wire) for i, g in gradients.items()}
    places = buckets.in_order(gradients, strategy.bucket_bytes)
    # Lists, since `tf.nest` would put the keys of a dictionary into an order of its own.
    *first, last = [[sent[i] for i in bucket] for bucket in places]
    *summed, (of_last, rest) = buckets.each(
        functools.partial(all_reduced, strategy),
        [*first, (last, rest)],
        strategy.bucket_bytes,
        strategy.buckets_wait,
    )
    totals = buckets.by_place(places, [*summed, of_last])
    return {i: tf.cast(total, gradients[i].dtype) for i, total in totals.items()}, rest
