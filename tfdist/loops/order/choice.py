"""Which order data have, and what a start-up table says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import pipelines
from tfdist.loops.order.arrays import ShuffledArrays
from tfdist.loops.order.passes import DataOrder, is_endless
from tfdist.loops.order.records import PipelineOrder
from tfdist.upstream import keras_data, tensorflow_data


def order_of(x: Any, adapter: Any, again: Callable[[Any], Any]) -> DataOrder:
    """Returns how data begin.

    Args:
        x: The data.
        adapter: Of Keras; reads them.
        again: Returns an adapter for another data set in their place.
    """
    if (restart := pipelines.restart_of(x)) is not None:
        return PipelineOrder(adapter, restart, again)
    return ShuffledArrays(adapter) if keras_data.are_arrays(adapter) else DataOrder(adapter)


def going_on(dataset: tf.data.Dataset) -> str:
    """Returns what the start-up table says of how a data set goes on within a pass."""
    if pipelines.restart_of(dataset) is not None:
        return "at the position in the records"
    if is_endless(dataset) and tensorflow_data.has_iterator_state(dataset):
        return "from the state of the iterator, or past the batches already seen"
    return "past the batches already seen, which are read again"
