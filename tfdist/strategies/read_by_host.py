"""What keeps an operation in a graph, and tells when it has run."""

from __future__ import annotations

import tensorflow as tf


def read_by_host(tensor: tf.Tensor) -> tf.Operation:
    """Has the host of a tensor read its first element, which nobody uses.

    TensorFlow's graph optimizer knows sizes beforehand, and of a copy that nobody uses it leaves a
    control edge, or nothing. The data of an assertion it leaves, since that may have to print them.

    Args:
        tensor: Of a graph, of rank 0 or more.
    """
    with tf.device(tensor.device):
        first = tf.reshape(tensor, [-1])[:1]
    host = tf.DeviceSpec.from_string(tensor.device).replace(device_type="CPU", device_index=0)
    with tf.device(host):
        return tf.raw_ops.Assert(condition=True, data=[first])
