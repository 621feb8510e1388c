"""Which processes a parameter-server cluster has, and which of them this one is."""

from __future__ import annotations

from typing import Any

from tfdist.cluster import Cluster
from tfdist.errors import ClusterError, ConfigurationError
from tfdist.strategies.parameter_server import processes


def find(cluster: Cluster, devices: Any, num_servers: Any) -> dict[str, list[str]]:
    """Returns the addresses of the cluster that this process is the chief of, by task.

    Args:
        cluster: What the environment says.
        devices: How many workers one in line has; None: 2.
        num_servers: How many servers it has; None: 1.

    Raises:
        ConfigurationError: Not a number, or a number where the environment has it.
        ClusterError: The cluster lacks a task.
        SystemExit: In a worker or server, once the chief is done.
    """
    if cluster.ps and (devices is not None or num_servers is not None):
        raise ConfigurationError(
            f"devices and num_servers are for a cluster in line, but {cluster.source} names "
            f"workers and {len(cluster.ps)} servers: leave them out."
        )
    if cluster.ps:
        return _join(cluster)
    if cluster.size > 1:
        raise ClusterError(
            f"{cluster.source} starts {cluster.size} workers that do the same, but "
            "parameter_server needs a chief, workers and ps: python -m tfdist.launch --num-workers "
            "N --num-ps M."
        )
    return processes.in_line(_number("devices", devices, 2), _number("num_servers", num_servers, 1))


def _number(option: str, value: Any, default: int) -> int:
    """Checks a number of processes."""
    if value is None:
        return default
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(
            f"{option}={value!r}: expected how many to start in line, 1 or more."
        )
    return value


def _join(cluster: Cluster) -> dict[str, list[str]]:
    """Takes this process's place; returns the cluster's addresses in the chief.

    Raises:
        ClusterError: The cluster lacks a task.
        SystemExit: The place is not the chief's, and the chief is done.
    """
    tasks = cluster.tasks()
    if missing := [task for task in ("chief", "worker", "ps") if not tasks.get(task)]:
        raise ClusterError(
            f"{cluster.source} names no task {missing[0]!r}: parameter_server needs a chief that "
            "runs the script, workers and ps."
        )
    if cluster.task in ("worker", "ps"):
        processes.serve(cluster)
    if cluster.task != "chief":  # evaluation is in line, in the chief
        raise SystemExit(0)
    return tasks
