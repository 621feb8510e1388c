"""A stand-in for NCCL on logical CPU devices.

TensorFlow's first `CollectiveReduce` behaves as `NcclAllReduce` does where it matters: it waits
until every device has called it, it has no order of its own, and it is pruned on a device whose
code does not use the result, on which the other devices then wait forever.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import gen_collective_ops, nccl_ops

from tfdist.strategies import mirrored
from tfdist.strategies.base import ReplicaFn
from tfdist.strategies.mirrored import Mirrored
from tfdist.upstream.patching import replaced

#: Time-out of a collective that some devices never call.
TIMEOUT_SECONDS = 60.0

#: One key for each group of devices; no strategy of `tf.distribute` uses these keys.
_group_keys: dict[tuple[str, ...], int] = collections.defaultdict(
    functools.partial(next, itertools.count(1 << 19))
)
#: Keys of operations, which are used once.
_instance_keys = itertools.count(1)


def nccl_dtypes() -> set[tf.DType]:
    """Returns the dtypes that `NcclAllReduce` accepts, by its op definition."""
    (of_input,) = (a for a in op_def_registry.get("NcclAllReduce").attr if a.name == "T")
    return {tf.as_dtype(dtype) for dtype in of_input.allowed_values.list.type}


def all_sum(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Replaces `nccl_ops.all_sum`.

    Args:
        tensors: One per device, on that device.

    Raises:
        TypeError: NCCL does not sum such a dtype.
        ValueError: A tensor names no device.
    """
    key = next(_instance_keys)

    def sums() -> list[tf.Tensor]:
        results = []
        for tensor in tensors:
            if tensor.dtype not in nccl_dtypes():
                raise TypeError(f"NcclAllReduce does not accept {tensor.dtype.name}.")
            if not tensor.device:  # as `nccl_ops` says
                raise ValueError(f"Device assignment required for nccl collective ops: {tensor}")
            with tf.device(tensor.device):
                results.append(
                    gen_collective_ops.collective_reduce(
                        tensor,
                        group_size=len(tensors),
                        group_key=_group_keys[tuple(t.device for t in tensors)],
                        instance_key=key,
                        merge_op="Add",
                        final_op="Id",
                        subdiv_offsets=[0],
                        timeout_seconds=TIMEOUT_SECONDS,
                    )
                )
        return results

    # If called one after the other, the first would wait for the second forever.
    return tf.function(sums, autograph=False)() if tf.executing_eagerly() else sums()


class NcclStandIn(Mirrored):
    """`Mirrored` over CPU devices as it would be over GPUs that communicate through NCCL."""

    def __init__(self, devices: int | Sequence[str], **options: Any) -> None:
        with replaced(mirrored, "_resolve", _unchecked):
            super().__init__(devices, all_reduce="nccl", **options)

    def run(self, fn: ReplicaFn) -> Any:
        with replaced(nccl_ops, "all_sum", all_sum):
            return super().run(fn)


def _unchecked(all_reduce: str, merge_on: str, devices: Sequence[str]) -> str:
    del merge_on, devices  # without the check that these are GPUs
    return all_reduce
