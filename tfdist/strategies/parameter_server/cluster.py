"""The processes of a parameter-server cluster: which there are, and what each of them does.

TensorFlow connects a process to one cluster, once, and what was created before (variables, data
sets) is lost to it. So the connection is kept, and every strategy object of the process uses it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import tensorflow as tf

from tfdist.cluster import Cluster, gpus
from tfdist.cluster.deadline import counted
from tfdist.cluster.membership import RENDEZVOUS_SECONDS
from tfdist.cluster.networks import bypass_proxy, check_free, free_ports
from tfdist.cluster.record import split
from tfdist.errors import ClusterError, ConfigurationError

#: Seconds that a worker or server keeps looking for a chief that stopped answering.
CHIEF_GONE_SECONDS = 10.0

_connected: tuple[dict[str, list[str]], tf.distribute.ParameterServerStrategy] | None = None
_servers: list[tf.distribute.Server] = []  # of this process; they end with it


def find_tasks(cluster: Cluster, devices: Any, num_servers: Any) -> dict[str, list[str]]:
    """Returns the addresses, by task, of the cluster of which this process is the chief.

    Args:
        cluster: What the environment says.
        devices: The number of workers of an in-process cluster; None: 2.
        num_servers: The number of its parameter servers; None: 1.

    Raises:
        ConfigurationError: An invalid number, or a number that the environment sets already.
        ClusterError: The cluster lacks a task.
        SystemExit: In a worker or server, when the chief is done.
    """
    if cluster.ps and (devices is not None or num_servers is not None):
        raise ConfigurationError(
            f"devices and num_servers are for an in-process cluster, but {cluster.source} defines "
            f"workers and {len(cluster.ps)} servers. Remove them."
        )
    if cluster.ps:
        # This process runs its task, and continues if it is the chief.
        tasks = cluster.tasks()
        if missing := [task for task in ("chief", "worker", "ps") if not tasks.get(task)]:
            raise ClusterError(
                f"{cluster.source} names no task {missing[0]!r}: parameter_server needs a chief "
                "that runs the script, workers and ps."
            )
        if cluster.task in ("worker", "ps"):
            serve(cluster)
        if cluster.task != "chief":  # the chief evaluates
            raise SystemExit(0)
        return tasks
    if cluster.size > 1:
        raise ClusterError(
            f"{cluster.source} starts {cluster.size} workers that do the same, but "
            "parameter_server needs a chief, workers and ps: python -m tfdist.launch --num-workers "
            "N --num-ps M."
        )
    return in_process(_number("devices", devices, 2), _number("num_servers", num_servers, 1))


def _number(option: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(
            f"{option}={value!r}: expected how many to start in this process, 1 or more."
        )
    return value


def connect(tasks: dict[str, list[str]]) -> tf.distribute.ParameterServerStrategy:
    """Connects this process to a cluster as its chief.

    Raises:
        ConfigurationError: This process is connected to another cluster.
        ClusterError: A worker or server does not start, or the chief's port is in use.
    """
    global _connected
    if _connected is None:
        check_free(tasks["chief"][0])
        bypass_proxy(chain.from_iterable(tasks.values()))
        _wait_for([*tasks["ps"], *tasks["worker"]])
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(tasks), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        _connected = tasks, tf.distribute.ParameterServerStrategy(resolver)
    if _connected[0] != tasks:
        raise ConfigurationError(
            f"This process is connected to {_size(_connected[0])}, and TensorFlow connects one "
            f"once: use that size instead of {_size(tasks)}, or restart the kernel."
        )
    return _connected[1]


def in_process(num_workers: int, num_servers: int) -> dict[str, list[str]]:
    """Starts workers and servers as threads of this process, for notebooks and tests.

    Returns:
        Their addresses; those of the running cluster, if it has the same size.
    """
    if _connected is not None and _servers:
        tasks = _connected[0]
        if (len(tasks["worker"]), len(tasks["ps"])) == (num_workers, num_servers):
            return tasks
    ports = free_ports(1 + num_workers + num_servers)
    addresses = [f"localhost:{port}" for port in ports]
    tasks = {
        "chief": addresses[:1],
        "worker": addresses[1 : 1 + num_workers],
        "ps": addresses[1 + num_workers :],
    }
    if _connected is None:
        # A worker that waits for a server blocks a thread, and by default there is one per core.
        options = tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=num_workers + num_servers + 1, device_count={"GPU": 0}
        )
        for task in ("worker", "ps"):
            _servers.extend(
                tf.distribute.Server(tasks, task, index, "grpc", options)
                for index in range(len(tasks[task]))
            )
    return tasks


def serve(cluster: Cluster) -> None:
    """Serves the chief as a worker or parameter server until the chief is gone.

    A scheduler that preempts a job signals all processes (SIGTERM, SIGUSR1). The chief finishes its
    step first, for which it needs this process.

    Raises:
        ClusterError: No chief started, or another process listens at this one's address.
    """
    check_free(cluster.address)
    bypass_proxy(chain.from_iterable(cluster.tasks().values()))
    options = server_options(cluster, len(tf.config.get_visible_devices("GPU")))
    server = tf.distribute.Server(cluster.tasks(), cluster.task, cluster.index, "grpc", options)
    (chief,) = cluster.tasks()["chief"]
    _wait_for([chief])
    # From here on, signals that end a process are only noted, except for ignored ones.
    preempted: list[int] = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda received, _: preempted.append(received))
    silent_since = time.monotonic()
    while time.monotonic() < silent_since + CHIEF_GONE_SECONDS:
        if _answers(chief):
            silent_since = time.monotonic()
        elif preempted:
            break
        time.sleep(1.0)
    del server  # held until here


def server_options(cluster: Cluster, num_gpus: int) -> tf.compat.v1.ConfigProto:
    """Returns the configuration of a worker's or parameter server's TensorFlow server.

    A worker computes on one GPU. Workers of one host take different ones, as far as there are
    enough; servers take none.
    """
    if cluster.task != "worker" or not num_gpus:
        return tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    hosts = [split(address)[0] for address in cluster.tasks()["worker"]]
    index_on_host = hosts[: cluster.index].count(hosts[cluster.index])
    gpu = 0 if os.environ.get(gpus.PER_WORKER) else index_on_host % num_gpus
    return tf.compat.v1.ConfigProto(
        device_count={"GPU": 1},
        gpu_options=tf.compat.v1.GPUOptions(allow_growth=True, visible_device_list=str(gpu)),
    )


@counted()
def _wait_for(addresses: Sequence[str]) -> None:
    """Waits until a process listens at each address."""
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while silent := [address for address in addresses if not _answers(address)]:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"No process answers at {', '.join(silent)} after {RENDEZVOUS_SECONDS:.0f} s: "
                "start every task of the cluster, each with its own TF_CONFIG."
            )
        time.sleep(0.2)


def _answers(address: str) -> bool:
    try:
        with socket.create_connection(split(address), timeout=CHIEF_GONE_SECONDS / 2):
            return True
    except OSError:
        return False


def _size(tasks: dict[str, list[str]]) -> str:
    return f"{len(tasks['worker'])} workers and {len(tasks['ps'])} parameter servers"
