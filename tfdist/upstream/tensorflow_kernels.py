"""TensorFlow's registry of kernels: what a GPU can run, and what it takes from the host.

The wheel registers its CUDA kernels when it is loaded, with or without a GPU or a driver.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry
from tensorflow.python.ops import gen_nn_ops, math_ops

from tfdist.upstream.patching import replaced

#: Types of devices whose kernels serve a GPU. Kernels for any device are registered as "DEFAULT".
_ON_GPUS = ("GPU", "DEFAULT")

#: Names and dtypes of the attributes of an operation.
Dtypes = tuple[tuple[str, str], ...]


def dtypes_of(node: Any) -> Dtypes:
    """Returns the attributes of a node that are dtypes; those of a list share a name.

    Args:
        node: A `tf.compat.v1.NodeDef`.
    """
    dtypes = []
    for name, attribute in sorted(node.attr.items()):
        kind = attribute.WhichOneof("value")
        types = {"type": [attribute.type], "list": attribute.list.type}.get(kind, [])
        dtypes += [(name, tf.as_dtype(one).name) for one in types]
    return tuple(dtypes)


@functools.cache
def gpu_kernel(kind: str, dtypes: Dtypes) -> Any:
    """Returns the definition of a kernel for GPUs that accepts all dtypes of an operation, or None.

    Args:
        kind: The type of the operation.
        dtypes: As `dtypes_of` returns them.
    """
    accepting = (
        kernel
        for kernel in kernels.get_registered_kernels_for_op(kind).kernel
        if kernel.device_type in _ON_GPUS
        and all(
            tf.as_dtype(dtype).as_datatype_enum in constraint.allowed_values.list.type
            for constraint in kernel.constraint
            for name, dtype in dtypes
            if name == constraint.name
        )
    )
    return next(accepting, None)


def inputs_in_host_memory(operation: tf.Operation) -> list[bool]:
    """Returns which inputs a GPU takes from host memory; all of them if it has no kernel."""
    return _in_host_memory(operation, "input_arg")


def outputs_in_host_memory(operation: tf.Operation) -> list[bool]:
    """Returns which outputs a GPU leaves in host memory; all of them if it has no kernel."""
    return _in_host_memory(operation, "output_arg")


def _in_host_memory(operation: tf.Operation, side: str) -> list[bool]:
    node, names = operation.node_def, []
    for argument in getattr(op_def_registry.get(operation.type), side):
        types = len(node.attr[argument.type_list_attr].list.type) if argument.type_list_attr else 1
        times = node.attr[argument.number_attr].i if argument.number_attr else types
        names += [argument.name] * times
    kernel = gpu_kernel(operation.type, dtypes_of(node))
    return [kernel is None or name in kernel.host_memory_arg for name in names]


@contextmanager
def sizes_of_reductions_on(device: str) -> Iterator[None]:
    """Computes the sizes in the gradients of reductions on a device: `math_ops.reduced_shape`.

    TensorFlow colocates them with the shape of the reduction's input, and some of them run on the
    GPU then. No device scope changes that.
    """
    plain = math_ops.reduced_shape

    def reduced_shape(input_shape: tf.Tensor, axes: tf.Tensor) -> tf.Tensor:
        if tf.executing_eagerly():
            return plain(input_shape, axes)
        graph = tf.compat.v1.get_default_graph()
        with graph.colocate_with(None, ignore_existing=True), tf.device(device):
            return plain(input_shape, axes)

    with replaced(math_ops, "reduced_shape", reduced_shape):
        yield


@contextmanager
def gradients_of_biases_as_sums() -> Iterator[None]:
    """Computes the gradients of biases in half precision by `tf.reduce_sum`.

    In TensorFlow's kernel for GPUs, `BiasAddGrad`, blocks of threads add to the same half-precision
    numbers by compare-and-swap. In a transformer on an H200, a call took 0.35 ms, and other sums
    over rows 0.03 ms. The sum accumulates in float32, as the kernel does within a block.
    """
    plain = gen_nn_ops.bias_add_grad

    def bias_add_grad(
        out_backprop: tf.Tensor, data_format: str | bytes = "NHWC", name: str | None = None
    ) -> tf.Tensor:
        rank = out_backprop.shape.rank
        is_last = tf.compat.as_str(data_format) == "NHWC"
        if out_backprop.dtype.size != 2 or not is_last or rank is None:
            return plain(out_backprop, data_format, name)
        total = tf.reduce_sum(tf.cast(out_backprop, tf.float32), range(rank - 1))
        return tf.cast(total, out_backprop.dtype, name=name)

    with replaced(gen_nn_ops, "bias_add_grad", bias_add_grad):
        yield
