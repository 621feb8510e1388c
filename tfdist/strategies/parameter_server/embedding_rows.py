"""Reading rows of a table where the table is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from tfdist.upstream.patching import replaced


@contextmanager
def sent_alone() -> Iterator[None]:
    """Lets `keras.layers.Embedding` fetch the rows of a batch from a server.

    Keras reads the whole variable first, which crosses the network for every batch.
    """
    whole = backend.numpy.take

    def take(x: Any, indices: Any, axis: int | None = None) -> tf.Tensor:
        is_table = isinstance(x, keras.Variable) and axis == 0 and isinstance(indices, tf.Tensor)
        if not is_table or _assigned(x):
            return whole(x, indices, axis)
        rows = tf.where(indices < 0, indices + x.shape[0], indices)  # as Keras counts
        return x._maybe_autocast(tf.gather(x._value, rows))

    with replaced(backend.numpy, "take", take):
        yield


def _assigned(variable: keras.Variable) -> bool:
    """Whether this forward pass has given the variable another value, which no server knows."""
    if not backend.in_stateless_scope():
        return False
    return backend.get_stateless_scope().get_current_value(variable) is not None
