"""Platforms that start one process per container or machine, and give the address of the first."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.cluster.environments.base import DEFAULT_PORT, Variables
from tfdist.cluster.record import Cluster, Environ, joined, number
from tfdist.errors import ClusterError

LEADER_WORKER_SET = Variables(
    "LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", master="LWS_LEADER_ADDRESS"
)
DSTACK = Variables("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", master="DSTACK_MASTER_NODE_IP")


@dataclass(frozen=True)
class SkyPilot:
    """SkyPilot: the number of this node, and the addresses of all."""

    name: str = "SkyPilot"

    def detect(self, environ: Environ) -> str:
        """Returns the variable of the rank if it is set."""
        return "SKYPILOT_NODE_RANK" if "SKYPILOT_NODE_IPS" in environ else ""

    def read(self, environ: Environ) -> Cluster:
        """Returns the cluster.

        Raises:
            ClusterError: The rank is not a number, or has no address.
        """
        rank = number(environ, "SKYPILOT_NODE_RANK")
        return _of_hosts(self.name, environ["SKYPILOT_NODE_IPS"].split(), rank)


@dataclass(frozen=True)
class SageMaker:
    """SageMaker: the names of all hosts, and the name of this one."""

    name: str = "SageMaker"

    def detect(self, environ: Environ) -> str:
        """Returns the variable of the hosts if it is set."""
        return "SM_HOSTS" if "SM_CURRENT_HOST" in environ and "SM_HOSTS" in environ else ""

    def read(self, environ: Environ) -> Cluster:
        """Returns the cluster.

        Raises:
            ClusterError: This host is not among the hosts.
        """
        text, here = environ["SM_HOSTS"], environ["SM_CURRENT_HOST"]
        try:
            hosts = [str(host) for host in json.loads(text)]
            return _of_hosts(self.name, hosts, hosts.index(here))
        except (ValueError, TypeError):
            raise ClusterError(
                f"SM_HOSTS: expected a JSON list with the host {here!r} of SM_CURRENT_HOST, got "
                f"{text!r}. Unset SM_HOSTS, or set TF_CONFIG."
            ) from None


@dataclass(frozen=True)
class Volcano:
    """A job of Volcano with the plugins `env` and `svc`, whose pods have one kind of task."""

    name: str = "Volcano"

    def detect(self, environ: Environ) -> str:
        """Returns the variable of the hosts, unless there are several kinds of tasks."""
        kinds = [name for name in environ if re.fullmatch(r"VC_\w+_HOSTS", name)]
        return kinds[0] if len(kinds) == 1 and "VC_TASK_INDEX" in environ else ""

    def read(self, environ: Environ) -> Cluster:
        """Returns the cluster.

        Raises:
            ClusterError: The rank is not a number, or has no address.
        """
        hosts = environ[self.detect(environ)].split(",")
        return _of_hosts(self.name, hosts, number(environ, "VC_TASK_INDEX"))


def _of_hosts(name: str, hosts: Sequence[str], rank: int) -> Cluster:
    """Returns a cluster with a process on each host."""
    master = joined(hosts[0], DEFAULT_PORT) if hosts and hosts[0] else ""
    return Cluster(name, rank, max(len(hosts), 1), master=master)
