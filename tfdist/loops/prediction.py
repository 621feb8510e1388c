"""A prediction: batch by batch, and the outputs of all batches laid end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from tfdist.loops import epoch
from tfdist.loops.epoch import OuterLoop
from tfdist.loops.feed import Feed
from tfdist.strategies.inner_loop import Logs, Made
from tfdist.upstream import keras_data


def run(outer: OuterLoop, feed: Feed, callbacks: keras.callbacks.CallbackList) -> Any:
    """Returns the model's outputs for the rows of a feed, in order, as NumPy arrays.

    Args:
        outer: What all loops of the trainer work with.
        feed: What to predict from.
        callbacks: Hear of every batch and its outputs; may set `stop_predicting`.
    """
    predict = outer.functions.predict(feed)
    outputs: list[Any] = []

    def some_batches(iterator: Iterator[Any], wanted: int) -> tuple[Made, Logs]:
        made, pieces = predict(iterator, wanted)
        outputs.extend(pieces)
        return made, {"outputs": _end_to_end(pieces)} if made.num_steps else {}

    callbacks.on_predict_begin()
    outer.model.stop_predicting = False
    observers = outer.observers("predict", callbacks, "a prediction")
    per_call = outer.per_call("predict", callbacks, feed)
    epoch.run(some_batches, feed, per_call, outer.strategy, observers)
    callbacks.on_predict_end()
    return keras_data.as_arrays(_end_to_end(outputs))


def _end_to_end(outputs: list[Any]) -> Any:
    """Joins the outputs of several replicas and batches along the rows."""

    def join(*tensors: Any) -> Any:
        filled = [tensor for tensor in tensors if tensor.shape[0] != 0] or [tensors[0]]
        return keras_data.concatenated(filled)

    return keras.tree.map_structure(join, *outputs)
