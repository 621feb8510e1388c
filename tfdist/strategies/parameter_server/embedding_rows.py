"""Reading rows of a table where the table is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from tfdist.upstream import keras_model


def sent_alone() -> AbstractContextManager[None]:
    """Lets `keras.layers.Embedding` fetch the rows of a batch from a server.

    Keras reads the whole variable first, which crosses the network for every batch.
    """
    return keras_model.rows_taken_by(_take)


def _take(take: Any, x: Any, indices: Any, axis: int | None = None) -> tf.Tensor:
    is_table = isinstance(x, keras.Variable) and axis == 0 and isinstance(indices, tf.Tensor)
    # Where this forward pass has given the variable another value, no server knows it.
    if not is_table or keras_model.value_in_scope(x) is not None:
        return take(x, indices, axis)
    rows = tf.where(indices < 0, indices + x.shape[0], indices)  # as Keras counts
    return keras_model.rows_of(x, rows)
