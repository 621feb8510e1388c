"""Reading the clock within a graph, after devices have computed tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence

import tensorflow as tf

from tfdist.upstream.tensorflow_runtime import computes_in_one_order


def now() -> tf.Tensor:
    """Returns the time in seconds, float64; only differences of two readings have a meaning.

    TensorFlow refuses its own clock where operations have to be deterministic. Python's clock costs
    a few microseconds more and works there. No number that is trained depends on either.
    """
    if computes_in_one_order():
        return tf.ensure_shape(tf.numpy_function(time.monotonic, [], tf.float64), [])
    return tf.timestamp()


def after(tensors: Sequence[tf.Tensor | None]) -> tf.Tensor:
    """Returns the time at which the devices have computed the tensors, as `now`.

    For the graph, and for control edges, a GPU's operation is over once it is in the GPU's queue.
    A value that the host reads exists only when the GPU has computed it.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    with tf.control_dependencies(
        [read_by_host(t) if _runs_ahead(t.device) else t for t in present]
    ):
        return now()


def read_first(tensors: Sequence[tf.Tensor | None], after: tf.Tensor) -> Sequence[tf.Tensor]:
    """Returns what a loop has to wait for before it starts the next step.

    Args:
        tensors: What devices compute.
        after: The time at which they have done so. On CPUs the loop waits for it, or the next step
            might take all threads before the clock is read. On GPUs the graph runs ahead instead.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    return present if any(_runs_ahead(tensor.device) for tensor in present) else [after]


def read_by_host(tensor: tf.Tensor) -> tf.Operation:
    """Makes the host of a tensor read its first element, so that the tensor is computed.

    TensorFlow's graph optimizer removes an unused copy, or replaces it with a control edge. It
    keeps the data of an assertion, since the assertion may have to print them.

    Args:
        tensor: A tensor of a graph, of any rank.
    """
    with tf.device(tensor.device):
        first = tf.reshape(tensor, [-1])[:1]
    host = tf.DeviceSpec.from_string(tensor.device).replace(device_type="CPU", device_index=0)
    with tf.device(host):
        return tf.raw_ops.Assert(condition=True, data=[first])


def _runs_ahead(device: str) -> bool:
    """Returns whether the graph continues before the device has computed what it was given."""
    return tf.DeviceSpec.from_string(device).device_type == "GPU"
