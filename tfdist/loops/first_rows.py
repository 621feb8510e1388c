"""Small batches of the rows of the first batch, for trial steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.loops.data_handler import DataHandler
from tfdist.strategies import batches
from tfdist.strategies.base import Strategy


def few_rows(data: DataHandler, num_parts: int, num_steps: int, alike: bool) -> list[Any]:
    """Returns small batches of the first batch, which stays as it is if its size is fixed.

    Args:
        data: The data.
        num_parts: Replicas times micro-batches. Their rows are uneven if possible.
        num_steps: Number of batches.
        alike: Whether each part gets the same rows. Then the moments of BatchNorm per replica are
            those of all rows.
    """
    batch = data.first_batch()
    total = int(batches.num_rows(batch))
    if alike:
        rows = batches.take(batch, 0, min(total, 3))
        return [tf.nest.map_structure(lambda t: _repeated(t, num_parts), rows)] * num_steps
    specs = [s for s in tf.nest.flatten(data.element_spec) if s is not None and s.shape.rank]
    if any(spec.shape[0] is not None for spec in specs):
        return [batch] * num_steps
    # All of one size: eagerly, Keras weights the losses of several outputs by rows, which it does
    # not do in a graph.
    few = min(total, 2 * num_parts + 1)
    starts = [step * few % (total - few + 1) for step in range(num_steps)]
    return [batches.take(batch, start, start + few) for start in starts]


def iterator(parts: Sequence[Any], data: DataHandler, strategy: Strategy) -> Iterator[Any]:
    """Returns an iterator over batches like those of an epoch, so that no step is traced again."""
    specs = tf.nest.flatten(data.element_spec)

    def relaxed(*leaves: Any) -> Any:
        loose = map(_with_shape_of, tf.nest.flatten(leaves), specs)
        return tf.nest.pack_sequence_as(parts[0], list(loose))

    one_by_one = [tf.data.Dataset.from_tensors(part).map(relaxed) for part in parts]
    dataset = functools.reduce(tf.data.Dataset.concatenate, one_by_one)
    return iter(
        strategy.feed.distribute(
            dataset, data.own_rows, data.full_batches, check_data=data.check_data
        )
    )


def _with_shape_of(leaf: Any, spec: Any) -> Any:
    if spec is None or not isinstance(leaf, tf.Tensor):
        return leaf
    shape = spec.shape
    if leaf.shape != shape and shape.rank:
        shape = tf.TensorShape([None, *shape[1:]])
    return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=shape)


def _repeated(leaf: Any, times: int) -> Any:
    if not batches.has_rows(leaf):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.concat(0, [leaf] * times)
    return tf.concat([leaf] * times, 0)
