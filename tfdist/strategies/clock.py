"""The time within a graph."""

from __future__ import annotations

import time

import tensorflow as tf

from tfdist.upstream.tensorflow import computes_in_one_order


def now() -> tf.Tensor:
    """Returns seconds, of which only differences mean something; float64.

    TensorFlow's own clock is refused where operations have to be deterministic; Python's, which
    costs some microseconds more, is not. No number that is trained depends on either.
    """
    if computes_in_one_order():
        return tf.ensure_shape(tf.numpy_function(time.monotonic, [], tf.float64), [])
    return tf.timestamp()
