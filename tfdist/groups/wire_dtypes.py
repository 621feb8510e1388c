"""The dtypes in which tensors are sent, such that the transport accepts them."""

from __future__ import annotations

import tensorflow as tf


def wire_dtype(dtype: tf.DType, by_nccl: bool) -> tf.DType:
    """Returns the dtype in which a tensor is sent.

    Small integers are sent as int64: TensorFlow keeps int32 in host memory, and NCCL and the ring
    know few of the others. NCCL as TensorFlow calls it has no bfloat16 (`NcclAllReduce`'s `T`, and
    `NcclManager::AddParticipant` for `CollectiveReduceV2`), of which float32 holds every value.

    Args:
        dtype: Of the tensor.
        by_nccl: Whether NCCL sends it.
    """
    if dtype.is_integer and dtype.size < tf.int64.size:
        return tf.int64
    if by_nccl and dtype == tf.bfloat16:
        return tf.float32
    return dtype
