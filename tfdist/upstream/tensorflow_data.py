"""The state and the order of data sets of TensorFlow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import prefetch_op

#: `tf.data.experimental.ExternalStatePolicy.FAIL`, as operations take it.
_FAIL_IF_STATEFUL = 2


def is_reshuffled(dataset: tf.data.Dataset) -> bool:
    """Tells whether each iteration has an order of its own, so that a look would change the next.

    `DatasetV2._inputs`, and `_reshuffle_each_iteration` of those that `shuffle` makes.
    """
    again = getattr(dataset, "_reshuffle_each_iteration", False)
    return again is not False or any(map(is_reshuffled, dataset._inputs()))


def is_prefetched(dataset: tf.data.Dataset) -> bool:
    """Tells whether a data set is what `prefetch` returned: `prefetch_op._PrefetchDataset`."""
    return isinstance(dataset, prefetch_op._PrefetchDataset)


def iterator_state(iterator: Any) -> tf.Tensor | None:
    """Returns the state of an iterator of `tf.data`, buffers included, or None where it has none.

    Its `_iterator_resource`: `tf.train.Checkpoint` would write a file at once, and leaves out of
    its state what draws numbers or calls Python without a word.

    Returns:
        For `set_iterator_state`; of dtype variant.
    """
    if (resource := getattr(iterator, "_iterator_resource", None)) is None:
        return None  # of several devices
    try:
        return tf.raw_ops.SerializeIterator(
            resource_handle=resource, external_state_policy=_FAIL_IF_STATEFUL
        )
    except tf.errors.OpError:
        return None


def set_iterator_state(iterator: Any, state: tf.Tensor) -> None:
    """Gives an iterator the state of another one over the same data set.

    Raises:
        tf.errors.OpError: They do not go together.
    """
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=state)


def has_iterator_state(dataset: tf.data.Dataset) -> bool:
    """Tells whether iterators over a data set have a state that can be saved."""
    try:
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=_FAIL_IF_STATEFUL,
        )
    except tf.errors.OpError:
        return False
    return True
