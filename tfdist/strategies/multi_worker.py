"""Multi-worker: replicas on the devices of several processes or hosts.

On `tf.distribute.MultiWorkerMirroredStrategy`: every worker runs the same program, and TensorFlow's
own collectives join them over gRPC or NCCL.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.groups.buckets import GradientExchange
from tfdist.groups.collective import CHUNK_BYTES, CollectiveGroup
from tfdist.groups.fusion import has_size, in_chunks
from tfdist.groups.varying_sizes import VaryingSizes
from tfdist.strategies import STRATEGIES
from tfdist.strategies.tf_distribute import TFDistribute
from tfdist.upstream.tensorflow_runtime import ordering_tokens


class MultiWorker(TFDistribute):
    """Synchronous replicas on the devices of all workers.

    Create it before anything else uses TensorFlow, because a process joins a cluster as TensorFlow
    starts.

    Example:
        >>> from tfdist.strategies.multi_worker import MultiWorker
        >>> trainer = tfdist.Trainer(build_model, strategy=MultiWorker(communication="ring"))
        >>> trainer.strategy.communication
        'ring'

    Args:
        devices: The devices of this worker, as for `tfdist.devices.resolve`; the same number on
            every worker. Workers that see the same GPUs divide them by rank.
        communication: How sums are exchanged between workers: `"ring"` (gRPC, for CPUs), `"nccl"`
            (GPUs) or `"auto"` (NCCL if the devices are GPUs).
        bucket_mb: Megabytes of a gradient bucket, sent while the backward pass continues;
            `"auto"`: by the size of all gradients; `"all"`: one bucket.
        compression: `"fp16"` or `"bf16"` halves what is sent, and rounds it; `"none"` keeps the
            numbers of one device.

    Raises:
        ClusterError: The workers do not come together, or TensorFlow has started already.
        ConfigurationError: The communication is unknown or does not fit the devices, the
            compression is unknown, or the size of a bucket is invalid.
    """

    name = "multi_worker"
    default_cpus = 1

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        communication: str = "auto",
        bucket_mb: float | str = "auto",
        compression: str = "none",
    ) -> None:
        STRATEGIES["multi_worker"].check(compression=compression, communication=communication)
        exchange = GradientExchange.from_options(compression, bucket_mb)
        group = CollectiveGroup(devices, communication)
        self.communication = group.communication
        if compression == "bf16" and self._uses_nccl:
            raise ConfigurationError(
                "compression='bf16' needs sums of bfloat16, which TensorFlow's NCCL operations do "
                "not have: use compression='fp16' or 'none', or communication='ring'."
            )
        super().__init__(group.devices, group.tf_strategy, group=group, exchange=exchange)
        self._varying_sizes = VaryingSizes(
            ordering_tokens(self.tf_strategy),
            self.first_replica,
            self.num_replicas,
            self.communication,
        )

    @property
    def _uses_nccl(self) -> bool:
        return self.communication == "nccl"

    def all_reduce(self, tensors: list) -> list:
        # TensorFlow sends the last of a list first, and what is packed at the end.
        return super().all_reduce(tensors[::-1])[::-1]

    def _exchange(self, context: Any, packed: list) -> list:
        if tf.executing_eagerly():
            return context.all_reduce("SUM", packed)
        sized = [i for i, t in enumerate(packed) if has_size(t)]
        # TensorFlow returns a sum on the tensor's device; a tensor from outside has none yet.
        placed = [tf.identity(packed[i]) for i in sized]
        most = CHUNK_BYTES if self.communication == "ring" else sys.maxsize
        sums = in_chunks(lambda pieces: context.all_reduce("SUM", pieces), placed, most)
        results = dict(zip(sized, sums, strict=True))
        index = int(tf.get_static_value(context.replica_id_in_sync_group))
        for i, tensor in enumerate(packed):
            if i not in results:
                results[i] = self._varying_sizes.reduce(tensor, index)
        return [results[i] for i in range(len(packed))]
