"""Activations in host memory between the forward and the backward pass.

Every tensor that the backward pass reads is copied to the host when the forward pass has computed
it, and back shortly before it is read, while the devices compute. Its memory is free in between.
The backward pass computes the same values, and nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.patches.rematerialized import not_colocated
from tfdist.upstream.tensorflow_graphs import STORED, exchange_input

HOST = "/device:CPU:0"
#: The name of copies on the host.
ON_HOST = "offloaded_to_host"
#: Operations of the backward pass between the one that a copy waits for and the one that reads it,
#: during which it is on its way. What is read earlier stays on the device.
_AHEAD = 6
#: Operations that need the shape of an activation and wait for nothing: gradients of convolutions
#: have one.
_OF_SHAPES = ("Shape", "ShapeN", "Size", "Rank")


@contextmanager
def activations_on_host() -> Iterator[None]:
    """Returns a context in which the gradients are computed of what was computed before it.

    Raises:
        UnsupportedModelError: No graph is traced.
    """
    if tf.executing_eagerly():
        raise UnsupportedModelError(
            "offload_activations needs a graph. Remove run_eagerly=True from compile."
        )
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    backward = graph.get_operations()[before:]
    position = {op: i for i, op in enumerate(backward)}
    readers: dict[tf.Operation, dict[int, list[tf.Operation]]] = {}
    for op in backward:
        for tensor in op.inputs:
            if tensor.op not in position and _is_activation(tensor) and op.type not in _OF_SHAPES:
                readers.setdefault(tensor.op, {}).setdefault(tensor.value_index, []).append(op)
    for op, by_output in readers.items():
        for index, reading in by_output.items():
            if (earlier := _earlier(reading[0], position)) is not None:
                copy = _copy(op.outputs[index], earlier)
                for reader in dict.fromkeys(reading):
                    exchange_input(reader, op.outputs[index], copy)


def _is_activation(tensor: tf.Tensor) -> bool:
    if not tensor.dtype.is_floating or tensor.op.type in STORED:
        return False
    if tensor.op.inputs and all(one.op.type in STORED for one in tensor.op.inputs):
        return False  # a weight in another number format
    # The number of rows may be unknown, or small while memory is planned. Vectors have none.
    return tensor.shape.rank is None or tensor.shape.rank > 1


def _earlier(op: tf.Operation, position: dict[tf.Operation, int]) -> tf.Operation | None:
    """Returns an operation of the backward pass that an operation needs, some steps before it."""
    for _ in range(_AHEAD):
        floats = [tensor.op for tensor in op.inputs if tensor.dtype.is_floating]
        # Constants wait for nothing, and shapes for the forward pass only.
        needed = [one for one in floats if one in position and one.inputs]
        if not needed:
            return None
        op = max(needed, key=position.__getitem__)
    return op


def _copy(tensor: tf.Tensor, earlier: tf.Operation) -> tf.Tensor:
    """Returns a tensor on the host, which leaves it after an operation of the backward pass."""
    with (
        not_colocated(), tf.control_dependencies([earlier]), tf.device(HOST),
        tf.name_scope(ON_HOST),
    ):  # fmt: skip
        # Grappler removes an Identity between two devices, but not one of two tensors.
        return tf.identity_n([tensor, tf.constant(0)])[0]
