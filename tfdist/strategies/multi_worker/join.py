"""TensorFlow's strategy of all workers, told who they are and how long to wait for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager.context import context as tf_context
from tensorflow.python.eager.context import coordination_config_pb2

from tfdist.cluster import Cluster
from tfdist.errors import ClusterError

#: Seconds for which a worker waits for the others to come.
JOIN_SECONDS = 120
#: Seconds without a sign of life after which TensorFlow gives a worker up.
HEARTBEAT_SECONDS = 20

#: Bytes of one of TensorFlow's collectives over gRPC. It takes 100 MB at once three times as long
#: as pieces of 2 to 8 MB (1.9 s, 0.6 s; at 16 MB 0.10 s, 0.07 s; two processes of a busy host), and
#: by itself packs all the gradients of a step into one.
PIECE_BYTES = 1 << 22


@functools.cache
def tf_strategy(
    devices: tuple[str, ...], communication: str, workers: Cluster
) -> tf.distribute.Strategy:
    """Returns TensorFlow's strategy: one a process, since its collectives are numbered.

    Args:
        devices: Of this worker.
        communication: `"ring"` or `"nccl"`.
        workers: All of them, with their addresses.

    Raises:
        ClusterError: The workers do not come together, or TensorFlow has started already.
    """
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
