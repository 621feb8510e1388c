"""Computes the sizes of tensors on the host, where a step on a GPU needs them.

A GPU takes shapes from host memory, and TensorFlow computes most of them there. Some operations on
int32 run on the GPU all the same, such as the `GatherV2` and `Prod` in each dense layer on
sequences, if the size of the batch is unknown. Their results are copied back, for which the host
waits until the GPU has computed all that was queued before. Meanwhile it queues nothing that needs
the size, so that the GPU is idle afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import tensorflow as tf

from tfdist.upstream.tensorflow_graphs import BRANCHES, CALLS, LOOPS
from tfdist.upstream.tensorflow_runtime import outputs_in_host_memory

_Result = TypeVar("_Result")

#: Elements of the longest vector that counts as sizes. The length of some is not known.
_MAX_ELEMENTS = 64

#: Operations without kernels of their own, which are replaced by the bodies of functions.
_CALLS = {*CALLS, *BRANCHES, *LOOPS}


def has_gpus() -> bool:
    """Returns whether this host has GPUs."""
    return bool(tf.config.list_physical_devices("GPU"))


def on_host() -> AbstractContextManager[None]:
    """Returns a context in which operations are placed on the host if it has GPUs."""
    return tf.device("CPU:0") if has_gpus() else nullcontext()


def with_sizes_on_host(fn: Callable[..., _Result]) -> Callable[..., _Result]:
    """Returns a function that places operations on sizes on the host if this host has GPUs.

    Args:
        fn: Called in a graph, or eagerly, which changes nothing.
    """

    def placed(*arguments: object) -> _Result:
        if tf.executing_eagerly() or not has_gpus():
            return fn(*arguments)
        with tf.compat.v1.get_default_graph().device(_device_of):
            return fn(*arguments)

    return placed


def _device_of(operation: tf.Operation) -> str:
    """Returns the device of an operation that is being created: its own, or the host's."""
    if not _computes_sizes(operation):
        return operation.device
    device = tf.DeviceSpec.from_string(operation.device)
    return device.replace(device_type="CPU", device_index=0).to_string()


def _computes_sizes(operation: tf.Operation) -> bool:
    """Returns whether a GPU would compute small integers from ones that the host has."""
    inputs = [tensor for tensor in operation.inputs if not _is_constant(tensor)]
    return (
        bool(inputs)
        and operation.type not in _CALLS
        and all(map(_is_small_integer, [*operation.outputs, *operation.inputs]))
        and all(map(_is_on_host, operation.inputs))
        and not all(outputs_in_host_memory(operation))
    )


def _is_small_integer(tensor: tf.Tensor) -> bool:
    rank, size = tensor.shape.rank, tensor.shape.num_elements()
    is_integer = tensor.dtype.is_integer or tensor.dtype == tf.bool
    return is_integer and rank in (0, 1) and (size or 0) <= _MAX_ELEMENTS


def _is_constant(tensor: tf.Tensor) -> bool:
    """Returns whether TensorFlow computes a small integer when it optimizes the graph."""
    operation = tensor.op
    if operation.type == "Const":
        return True
    return (
        bool(operation.inputs)
        and _is_small_integer(tensor)
        and all(map(_is_constant, operation.inputs))
    )


def _is_on_host(tensor: tf.Tensor) -> bool:
    operation = tensor.op
    if operation.device.endswith("CPU:0"):
        return True
    if operation.type == "Placeholder":  # an argument; those of int32 are passed in host memory
        return tensor.dtype == tf.int32 and tensor.shape.rank == 0
    return operation.type not in _CALLS and outputs_in_host_memory(operation)[tensor.value_index]
