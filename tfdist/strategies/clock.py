"""The time within a graph."""

from __future__ import annotations

import time
from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.read_by_host import read_by_host
from tfdist.upstream.tensorflow import computes_in_one_order


def now() -> tf.Tensor:
    """Returns seconds, of which only differences mean something; float64.

    TensorFlow's own clock is refused where operations have to be deterministic; Python's, which
    costs some microseconds more, is not. No number that is trained depends on either.
    """
    if computes_in_one_order():
        return tf.ensure_shape(tf.numpy_function(time.monotonic, [], tf.float64), [])
    return tf.timestamp()


def after(tensors: Sequence[tf.Tensor | None]) -> tf.Tensor:
    """Returns the time at which their devices have computed tensors, as `now`.

    To the graph an operation of a GPU is over once it is in the GPU's queue, and so to a control
    edge. What the host reads out of a tensor is there only when the GPU has come that far.
    """
    known = [tensor for tensor in tensors if tensor is not None]
    with tf.control_dependencies([read_by_host(t) if _runs_ahead(t.device) else t for t in known]):
        return now()


def read_first(tensors: Sequence[tf.Tensor | None], after: tf.Tensor) -> Sequence[tf.Tensor]:
    """Returns what a loop has to wait for before it goes on from tensors.

    Args:
        tensors: That devices compute.
        after: The time of that. The next step may take all threads before it is read, unless the
            loop waits for it, too; where a GPU computes the graph is to go on meanwhile.
    """
    known = [tensor for tensor in tensors if tensor is not None]
    return known if any(_runs_ahead(tensor.device) for tensor in known) else [after]


def _runs_ahead(device: str) -> bool:
    """Whether the graph goes on before the device has computed what it was told to."""
    return tf.DeviceSpec.from_string(device).device_type == "GPU"
