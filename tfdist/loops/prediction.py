"""A prediction: one call a batch, and the outputs of all batches laid end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.tensorflow.trainer import (
    convert_to_np_if_not_ragged,
    potentially_ragged_concat,
)

from tfdist.loops.feed import Feed

#: Returns the outputs of the iterator's next batch by replica; None at the end of the data.
Predict = Callable[[Iterator[Any]], list[Any] | None]


def run(
    predict: Predict,
    feed: Feed,
    model: keras.Model,
    listeners: keras.callbacks.CallbackList,
    passed: Callable[[int], None],
) -> Any:
    """Returns the model's outputs for the rows of a feed, in order, as NumPy arrays.

    Args:
        predict: Computes one batch.
        feed: Where the batches come from.
        model: Its `stop_predicting`, which a callback may set, is heeded.
        listeners: Hear of every batch and its outputs.
        passed: Told of each batch that is done.
    """
    listeners.on_predict_begin()
    model.stop_predicting = False
    iterator, outputs, step = feed.begin_epoch(), [], 0
    while feed.num_left(step, 1) and not model.stop_predicting:
        listeners.on_predict_batch_begin(step)
        if (shares := predict(iterator)) is None:
            break
        passed(step)
        outputs += shares
        listeners.on_predict_batch_end(
            step, {"outputs": keras.tree.map_structure(_lay_end_to_end, *shares)}
        )
        step += 1
    feed.end_epoch(step, exhausted=step == 0)
    listeners.on_predict_end()
    whole = keras.tree.map_structure(_lay_end_to_end, *outputs)
    return keras.tree.map_structure(convert_to_np_if_not_ragged, whole)


def _lay_end_to_end(*parts: Any) -> Any:
    """Joins the outputs of shares and batches along the rows."""
    filled = [part for part in parts if part.shape[0] != 0] or [parts[0]]
    return potentially_ragged_concat(filled)
