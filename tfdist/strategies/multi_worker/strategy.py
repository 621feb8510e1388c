"""Multi-worker: replicas on the devices of several processes or hosts.

On `tf.distribute.MultiWorkerMirroredStrategy`: every worker runs the same program, and TensorFlow's
own collectives join them over gRPC or NCCL.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import cluster
from tfdist.errors import ConfigurationError
from tfdist.strategies import STRATEGIES
from tfdist.strategies.collectives.fusion import in_pieces
from tfdist.strategies.collectives.varying_sizes import VaryingSizes
from tfdist.strategies.multi_worker.join import PIECE_BYTES, meet, silent, tf_strategy
from tfdist.strategies.several_workers import SeveralWorkers
from tfdist.strategies.tf_distribute import TFDistribute
from tfdist.upstream.tensorflow_workers import ordering_tokens


class MultiWorker(SeveralWorkers, TFDistribute):
    """Synchronous replicas on the devices of all workers.

    Create it before anything else uses TensorFlow: a process joins a cluster as it starts.

    Args:
        devices: Of this worker, as `tfdist.devices.resolve` takes them; as many on every worker.
            Workers that see the same GPUs divide them by rank.
        communication: How sums cross the workers: `"ring"` (gRPC, for CPUs), `"nccl"` (GPUs) or
            `"auto"` (NCCL where the devices are GPUs).
        bucket_mb: As of `SeveralWorkers.cross_as`.
        compression: As there.

    Raises:
        ClusterError: The workers do not come together, or TensorFlow has started already.
        ConfigurationError: A communication that is unknown or does not fit the devices, an unknown
            compression, or no size of a bucket.
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
        STRATEGIES["multi_worker"].check(compression=compression)
        self.cross_as(compression, bucket_mb)
        STRATEGIES["multi_worker"].check(communication=communication)
        self.cluster, names = meet(cluster.current(), devices, communication)
        self.communication = _resolve(communication, names)
        _check_compression(compression, self.communication)
        self.num_workers, self.rank = self.cluster.size, self.cluster.rank
        super().__init__(names, tf_strategy(tuple(names), self.communication, self.cluster))
        self._varying_sizes = VaryingSizes(
            ordering_tokens(self.tf_strategy),
            self.first_replica,
            self.num_replicas,
            self.communication,
        )
        self.start()

    def silent(self) -> list[int]:
        return silent(self.cluster)

    def describe(self) -> dict[str, str]:
        return super().describe() | {"all-reduce": self.communication}

    @property
    def _uses_nccl(self) -> bool:
        return self.communication == "nccl"

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        # TensorFlow sends the last of a list first, and what is packed at the end.
        return super().all_reduce(tensors[::-1], op)[::-1]

    def gather_words(self, words: np.ndarray) -> np.ndarray:
        # Every replica takes part, with its share of the words behind its number.
        share = -(-words.size // self.num_local_replicas)
        parts = np.zeros((self.num_local_replicas, share), np.int64)
        parts.flat[: words.size] = words
        numbers = np.arange(len(parts))[:, None] + self.first_replica
        rows = self._gathered(tf.constant(np.concatenate([numbers, parts], 1))).numpy()
        rows = rows.reshape(self.num_replicas, 1 + share)
        in_order = rows[np.argsort(rows[:, 0]), 1:]
        return in_order.reshape(self.num_workers, -1)[:, : words.size]

    @functools.cached_property
    def _gathered(self) -> Callable[[tf.Tensor], tf.Tensor]:
        """Lays int64 of all replicas end to end, where each process has a row a replica."""

        def gathered(parts: tf.Tensor) -> tf.Tensor:
            gather, first = self._varying_sizes.gather, self.first_replica
            return self.local_results(self.run(lambda i: gather(parts[i], first + i)))[0]

        spec = tf.TensorSpec([self.num_local_replicas, None], tf.int64)
        return tf.function(gathered, input_signature=[spec], autograph=False)

    def _exchange(self, context: Any, op: str, packed: list) -> list:
        if tf.executing_eagerly():
            return context.all_reduce(op, packed)
        sized = [i for i, t in enumerate(packed) if _has_size(t)]
        # TensorFlow sends a sum back to the tensor's device: what came from outside has none yet.
        placed = [tf.identity(packed[i]) for i in sized]
        most = PIECE_BYTES if self.communication == "ring" else sys.maxsize
        sums = in_pieces(lambda pieces: context.all_reduce(op, pieces), placed, most)
        results = dict(zip(sized, sums, strict=True))
        index = int(tf.get_static_value(context.replica_id_in_sync_group))
        for i, tensor in enumerate(packed):
            if i not in results:
                results[i] = self._varying_sizes.reduce(tensor, index, op)
        return [results[i] for i in range(len(packed))]


def _has_size(tensor: Any) -> bool:
    return not isinstance(tensor, tf.IndexedSlices) and tensor.shape.is_fully_defined()


def _check_compression(compression: str, communication: str) -> None:
    """Checks that gradients can be sent in the format asked for."""
    if compression == "bf16" and communication == "nccl":
        raise ConfigurationError(
            "compression='bf16' needs sums of bfloat16, which TensorFlow's NCCL operations do not "
            "have: use compression='fp16' or 'none', or communication='ring'."
        )


def _resolve(communication: str, devices: Sequence[str]) -> str:
    """Checks the communication against the devices and returns the one that is meant."""
    on_gpus = all(name.startswith("GPU") for name in devices)
    if communication == "nccl" and not on_gpus:
        raise ConfigurationError(
            f"communication='nccl' joins GPUs, but the devices are {', '.join(devices)}: "
            "use communication='auto'."
        )
    if communication == "auto":
        return "nccl" if on_gpus else "ring"
    return communication
