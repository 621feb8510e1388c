"""What joins workers of TensorFlow: how long they wait, on which devices, and exchanges by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager.context import context, coordination_config_pb2
from tensorflow.python.ops import collective_ops

from tfdist.upstream.patching import replaced


def bound_waiting(
    tasks: Mapping[str, Sequence[str]], leader: str, join_seconds: int, silence_seconds: int
) -> None:
    """Sets how long workers wait: `context().configure_coordination_service`, of a private class.

    By itself TensorFlow waits an hour for one to come, and its public strategies take no number.

    Args:
        tasks: Addresses by the name of the job.
        leader: The job of the task that keeps the list of those who have come.
        join_seconds: For all to come.
        silence_seconds: Without a sign of life, after which one is given up; and for all to end.
    """
    jobs = [
        coordination_config_pb2.CoordinatedJob(name=name, num_tasks=len(addresses))
        for name, addresses in tasks.items()
    ]
    context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{leader}/replica:0/task:0",
        cluster_register_timeout_in_ms=join_seconds * 1000,
        heartbeat_timeout_in_ms=silence_seconds * 1000,
        shutdown_barrier_timeout_in_ms=silence_seconds * 1000,
        coordinated_jobs=jobs,
    )


@contextmanager
def workers_on(devices: Sequence[str]) -> Iterator[None]:
    """Lets a `MultiWorkerMirroredStrategy` that is made within take the devices given.

    `CollectiveAllReduceExtended._initialize_local_devices`, which takes all GPUs, or one CPU.

    Args:
        devices: Names such as `"GPU:1"`, of one kind.
    """

    def ours(_: Any, resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        del resolver
        kind = devices[0].partition(":")[0]
        return tuple(f"{worker_device}/device:{name}" for name in devices), kind

    with replaced(CollectiveAllReduceExtended, "_initialize_local_devices", ours):
        yield


def ordering_tokens(strategy: tf.distribute.Strategy) -> list[tf.Variable]:
    """Returns the variables that order the collectives of each device of this process.

    They are `CollectiveReplicaLauncher._ordering_token`, one per device. Collectives that use the
    same token run in the order in which they were traced. NCCL needs one order for all
    collectives of a device (`collective_communicator.cc`), so other collectives on these devices
    have to use the same tokens as the strategy's own.

    Args:
        strategy: A `MultiWorkerMirroredStrategy`.
    """
    launchers = strategy.extended._cross_device_ops._launchers
    return [launcher._ordering_token for launcher in launchers]


#: What replicas can do with tensors, each under keys of one's own.
_EXCHANGES = {"sum": collective_ops.all_reduce_v2, "lay end to end": collective_ops.all_gather_v2}


def exchanged_by_key(
    operation: str,
    tensor: tf.Tensor,
    group_size: int,
    keys: tuple[tf.Tensor, tf.Tensor],
    communication: str,
    token: tf.Variable,
) -> tf.Tensor:
    """Sums tensors of replicas, or lays them end to end: `all_reduce_v2`, `all_gather_v2`.

    `tf.distribute` numbers an operation when it is traced, and so has one size for it.

    Args:
        operation: `"sum"` or `"lay end to end"`, that with an axis 0.
        tensor: Of the same size and dtype wherever the keys are the same.
        group_size: How many replicas bring a tensor.
        keys: Of the group and of the operation within it, int32 scalars.
        communication: `"ring"` or `"nccl"`.
        token: Operations on one of these run in the order in which they were traced.
    """
    group_key, instance_key = keys
    return _EXCHANGES[operation](
        tensor,
        group_size=group_size,
        group_key=group_key,
        instance_key=instance_key,
        communication_hint=communication,
        ordering_token=token.handle,
    )
