"""What TensorFlow's kernels for CPUs hold beside their inputs and outputs.

Sources, in `tensorflow/core/kernels`: `conv_grad_filter_ops.cc` and `conv_grad_input_ops.h` (images
written out once for each place of the filter, so many that they fill a cache of 30 MB),
`maxpooling_op.cc` (which place the greatest came from), `matmul_op_impl.h` (16 bits are multiplied
in 32), `mkl/mkl_maxpooling_op.cc`; and `tensorflow/core/util/util.cc`, where oneDNN is taken. What
oneDNN itself needs is not TensorFlow's allocator's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from tfdist.upstream.tensorflow import uses_onednn

_Tensor = Callable[[tf.Operation], tf.Tensor]
#: The cache that convolutions of a CPU fill, and the one that a thread is to fill, in bytes.
_L3, _L2 = 30 << 20, 256 << 10
_INDEX_BYTES = 8
_MATMULS = {"MatMul", "BatchMatMulV2", "BatchMatMulV3"}
#: Where a convolution's result, or its gradient, and its filter are among what it reads and makes.
_CONVOLUTIONS: dict[str, tuple[_Tensor, _Tensor]] = {
    "Conv2D": (lambda op: op.outputs[0], lambda op: op.inputs[1]),
    "Conv2DBackpropInput": (lambda op: op.inputs[2], lambda op: op.inputs[1]),
    "Conv2DBackpropFilter": (lambda op: op.inputs[2], lambda op: op.outputs[0]),
}
_BACK = ("Conv2DBackpropInput", "Conv2DBackpropFilter")
_HALVES = (tf.float16, tf.bfloat16)


def workspaces(op: tf.Operation, cpus: int) -> list[int]:
    """Returns the bytes of each buffer that an operation takes while it computes.

    Args:
        op: Of a graph, all of whose shapes are known.
        cpus: Threads of one operation.
    """
    if not op.outputs or by_onednn(op.outputs[0].dtype):
        return []
    dtype = op.outputs[0].dtype
    if op.type in _BACK:
        made, weights = (tensor(op) for tensor in _CONVOLUTIONS[op.type])
        alone = cpus if op.type == "Conv2DBackpropInput" else 0
        return [_columns(made.shape, weights.shape, dtype.size, alone)]
    if op.type == "MaxPoolGrad":
        pooled = op.inputs[1].shape.num_elements()
        return [pooled * dtype.size, pooled * _INDEX_BYTES]
    if op.type in _MATMULS and dtype in _HALVES:
        return [4 * t.shape.num_elements() for t in (*op.inputs, *op.outputs)]
    return []


def places_kept(op: tf.Operation) -> int:
    """Returns the bytes that a pooling keeps for its gradient: oneDNN notes where the greatest is.

    0: this operation keeps nothing.
    """
    if op.type != "MaxPool" or not by_onednn(op.outputs[0].dtype):
        return 0
    window = math.prod(op.get_attr("ksize"))
    return op.outputs[0].shape.num_elements() * (1 if window < 256 else 4)


def work(op: tf.Operation) -> float:
    """Returns the multiplications of a convolution or a product of matrices; 0 of all others."""
    if op.type in _MATMULS:
        transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
        inner = op.inputs[0].shape[-2 if transposed else -1]
        return float(op.outputs[0].shape.num_elements() * inner)
    if op.type in _CONVOLUTIONS:
        made, weights = (tensor(op) for tensor in _CONVOLUTIONS[op.type])
        return float(made.shape.num_elements() * weights.shape.num_elements() / weights.shape[-1])
    return 0.0


def by_onednn(dtype: tf.DType) -> bool:
    """Whether oneDNN computes with these numbers on this machine's CPU."""
    if not uses_onednn():
        return False
    needs = {tf.float32: "", tf.bfloat16: "avx512f", tf.float16: "avx512_fp16"}
    return dtype in needs and needs[dtype] in _features()


def _features() -> str:
    """What this machine's CPU can do; nothing where nobody says."""
    try:
        return Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return ""


def _columns(gradient: tf.TensorShape, weights: tf.TensorShape, size: int, cpus: int = 0) -> int:
    """Bytes of the images that are written out.

    Args:
        gradient: Of the convolution's result: rows, height, width, channels.
        weights: Of its filter: height, width, channels of both sides.
        size: Bytes of a number.
        cpus: Threads, where large images are taken one by one; 0: they are not.
    """
    image = gradient[1] * gradient[2]
    places, channels = math.prod(weights[:3]), weights[3]
    work = image * places + image * channels + places * channels
    alone = cpus and (gradient[0] == 1 or work // cpus >= _L2 // size)
    num_images = 1 if alone else math.ceil(_L3 // size / work)
    return num_images * image * places * size
