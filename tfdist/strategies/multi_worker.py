"""Multi-worker: replicas on the devices of several processes or hosts.

On `tf.distribute.MultiWorkerMirroredStrategy`: every worker runs the same program, and TensorFlow's
own collectives join them over gRPC or NCCL.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager.context import context as tf_context
from tensorflow.python.eager.context import coordination_config_pb2

from tfdist import cluster
from tfdist.cluster import Cluster
from tfdist.devices import resolve
from tfdist.errors import ClusterError, ConfigurationError
from tfdist.strategies import agreement
from tfdist.strategies.any_size import AnySize
from tfdist.strategies.fusion import by_dtype, in_pieces
from tfdist.strategies.tf_distribute import TFDistribute

COMMUNICATION = ("auto", "ring", "nccl")

#: Seconds for which a worker waits for the others to come.
JOIN_SECONDS = 120
#: Seconds without a sign of life after which TensorFlow gives a worker up.
HEARTBEAT_SECONDS = 20

#: Bytes of one of TensorFlow's collectives over gRPC. It takes 100 MB at once three times as long
#: as pieces of 2 to 8 MB (1.9 s, 0.6 s; at 16 MB 0.10 s, 0.07 s; two processes of a busy host), and
#: by itself packs all the gradients of a step into one.
PIECE_BYTES = 1 << 22


class MultiWorker(TFDistribute):
    """Synchronous replicas on the devices of all workers.

    Create it before anything else uses TensorFlow: a process joins a cluster as it starts.

    Args:
        devices: Of this worker, as `tfdist.devices.resolve` takes them; as many on every worker.
        communication: How sums cross the workers: `"ring"` (gRPC, for CPUs), `"nccl"` (GPUs) or
            `"auto"` (NCCL where the devices are GPUs).

    Raises:
        ClusterError: The workers do not come together, or TensorFlow has started already.
        ConfigurationError: A communication that is unknown or does not fit the devices.
    """

    name = "multi_worker"
    default_cpus = 1

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        communication: str = "auto",
    ) -> None:
        names = resolve(devices, self.default_cpus)
        self.communication = _resolve(communication, names)
        self.cluster = _with_addresses(cluster.current())
        self.num_workers, self.rank = self.cluster.size, self.cluster.rank
        super().__init__(names, _tf_strategy(tuple(names), self.communication, self.cluster))
        self._any_size = AnySize(
            self.tf_strategy.extended.worker_devices,
            self.first_replica,
            self.num_replicas,
            self.communication,
        )
        agreement.meet(self)
        cluster.on_barrier(self.barrier)

    def describe(self) -> dict[str, str]:
        return super().describe() | self.cluster.describe() | {"all-reduce": self.communication}

    def _exchange(self, context: Any, op: str, packed: list) -> list:
        if tf.executing_eagerly():
            return by_dtype(lambda alike: context.all_reduce(op, alike), packed)
        sized = [i for i, t in enumerate(packed) if _has_size(t)]
        # TensorFlow sends a sum back to the tensor's device: what came from outside has none yet.
        placed = [tf.identity(packed[i]) for i in sized]
        most = PIECE_BYTES if self.communication == "ring" else sys.maxsize
        sums = in_pieces(lambda pieces: self._sums(context, op, pieces), placed, most)
        results = dict(zip(sized, sums, strict=True))
        index = int(tf.get_static_value(context.replica_id_in_sync_group))
        for i, tensor in enumerate(packed):
            if i not in results:
                results[i] = self._any_size.reduce(tensor, index, op)
        return [results[i] for i in range(len(packed))]

    def _sums(self, context: Any, op: str, tensors: list) -> list:
        return by_dtype(lambda alike: context.all_reduce(op, alike), tensors)


def _has_size(tensor: Any) -> bool:
    return not isinstance(tensor, tf.IndexedSlices) and tensor.shape.is_fully_defined()


def _with_addresses(workers: Cluster) -> Cluster:
    """Lets the workers meet before TensorFlow starts: who is missing or double is told to all."""
    if workers.size > 1:
        workers = cluster.exchange_addresses(workers, seconds=JOIN_SECONDS)
        cluster.use(workers)
    return workers


def _resolve(communication: str, devices: Sequence[str]) -> str:
    """Checks the communication against the devices and returns the one that is meant."""
    if communication not in COMMUNICATION:
        raise ConfigurationError(
            f"communication={communication!r}: expected one of {', '.join(COMMUNICATION)}."
        )
    on_gpus = all(name.startswith("GPU") for name in devices)
    if communication == "nccl" and not on_gpus:
        raise ConfigurationError(
            f"communication='nccl' joins GPUs, but the devices are {', '.join(devices)}: "
            "use communication='auto'."
        )
    if communication == "auto":
        return "nccl" if on_gpus else "ring"
    return communication


@functools.cache
def _tf_strategy(
    devices: tuple[str, ...], communication: str, workers: Cluster
) -> tf.distribute.Strategy:
    """Returns TensorFlow's strategy: one a process, since its collectives are numbered."""
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=getattr(
            tf.distribute.experimental.CommunicationImplementation, communication.upper()
        ),
        bytes_per_pack=PIECE_BYTES if communication == "ring" else 0,
    )
    if workers.size == 1:
        # Of no cluster: what TF_CONFIG may say of one worker would be another way of the same.
        nobody = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        with _on_devices(devices):
            return tf.distribute.MultiWorkerMirroredStrategy(nobody, options)
    if tf_context()._initialized:
        raise ClusterError(
            "TensorFlow has started in this process, which can no longer join other workers: "
            "create the Trainer, or tfdist.strategies.create('multi_worker'), before the first "
            "TensorFlow operation."
        )
    task = "chief" if workers.has_chief and workers.rank == 0 else "worker"
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(workers.tasks()),
        task_type=task,
        task_id=workers.index,
        rpc_layer="grpc",
    )
    _bound_waiting(workers)
    try:
        with _on_devices(devices):
            return tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except (tf.errors.OpError, RuntimeError) as error:
        raise ClusterError(
            f"Rank {workers.rank} did not come together with the other workers within "
            f"{JOIN_SECONDS} s: {_first_line(error)}\nStart all of {', '.join(workers.addresses)}, "
            "let each reach the others' ports, and give each a rank of its own."
        ) from error


def _bound_waiting(workers: Cluster) -> None:
    """Sets how long TensorFlow waits for workers; by itself it waits an hour for one to come."""
    jobs = [
        coordination_config_pb2.CoordinatedJob(name=name, num_tasks=len(addresses))
        for name, addresses in workers.tasks().items()
    ]
    tf_context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:chief/replica:0/task:0"
        if workers.has_chief
        else "/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=JOIN_SECONDS * 1000,
        heartbeat_timeout_in_ms=HEARTBEAT_SECONDS * 1000,
        shutdown_barrier_timeout_in_ms=HEARTBEAT_SECONDS * 1000,
        coordinated_jobs=jobs,
    )


@contextmanager
def _on_devices(devices: Sequence[str]) -> Iterator[None]:
    """Lets TensorFlow take the devices given: by itself it takes all GPUs, or one CPU."""

    def ours(_: Any, resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        del resolver
        kind = devices[0].partition(":")[0]
        return tuple(f"{worker_device}/device:{name}" for name in devices), kind

    with mock.patch.object(CollectiveAllReduceExtended, "_initialize_local_devices", ours):
        yield


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
