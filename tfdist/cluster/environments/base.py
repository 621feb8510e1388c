"""What an environment is, and those with variables for the rank and size, or a list of hosts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tfdist.cluster.record import Cluster, Environ, joined, number
from tfdist.errors import ClusterError

#: Where rank 0 listens if the environment names its host only.
DEFAULT_PORT = 29500


class Environment(Protocol):
    """A launcher or platform that tells a process its rank by environment variables.

    Attributes:
        name: Its name in tables and messages.
    """

    @property
    def name(self) -> str: ...

    def detect(self, environ: Environ) -> str:
        """Returns a variable without which it would not apply; empty if it does not apply."""

    def read(self, environ: Environ) -> Cluster:
        """Returns the cluster that it describes.

        Raises:
            ClusterError: The variables are incomplete or inconsistent.
        """


@dataclass(frozen=True)
class Variables:
    """An environment with a variable for each number.

    Attributes:
        name: Its name.
        rank: Variable with the rank of a process.
        size: Variable with the number of processes.
        local_rank: Variable with the rank on the host; not set: 0.
        local_size: Variable with the number of processes on the host; not set: as few as possible.
        master: Variable with the host of rank 0; empty: the environment has none.
        port: Variable with the port at which rank 0 listens.
        required: A further variable without which the environment does not apply.
        absent: Variables with which it does not apply, because another environment set its own.
    """

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    master: str = ""
    port: str = ""
    required: str = ""
    absent: tuple[str, ...] = ()

    def detect(self, environ: Environ) -> str:
        """Returns the variable of the rank if it is set."""
        if self.required and self.required not in environ:
            return ""
        applies = bool(environ.get(self.rank)) and not any(name in environ for name in self.absent)
        return self.rank if applies else ""

    def read(self, environ: Environ) -> Cluster:
        """Returns the cluster.

        Raises:
            ClusterError: A variable is missing or not a number.
        """
        size, host = number(environ, self.size), environ.get(self.master, "")
        local_rank = number(environ, self.local_rank, 0)
        if self.master and size > 1 and not host:
            raise ClusterError(
                f"{size} workers, but ${self.master} is not set. Set it to the address of rank 0."
            )
        return Cluster(
            self.name,
            number(environ, self.rank),
            size,
            local_rank,
            number(environ, self.local_size, local_rank + 1),
            master=joined(host, self._port(environ)) if host else "",
        )

    def _port(self, environ: Environ) -> int:
        return number(environ, self.port, DEFAULT_PORT)


# ---- launchers of MPI programs, and Horovod's: ranks, but no addresses ----


def _prefixed(name: str, prefix: str) -> Variables:
    """Returns an environment whose four variables have a common prefix."""
    return Variables(
        name,
        rank=f"{prefix}_RANK",
        size=f"{prefix}_SIZE",
        local_rank=f"{prefix}_LOCAL_RANK",
        local_size=f"{prefix}_LOCAL_SIZE",
    )


_PMI = ("PMI_RANK", "PMI_SIZE")
_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS = ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")

#: Launchers of MPI programs that give local ranks.
MPI = (
    _prefixed("Horovod", "HOROVOD"),
    _prefixed("Open MPI", "OMPI_COMM_WORLD"),
    Variables("MPICH / Hydra", *_PMI, *_HYDRA, required=_HYDRA[0]),
    Variables("PALS", *_PMI, *_PALS, required=_PALS[0]),
    _prefixed("MVAPICH", "MV2_COMM_WORLD"),
    _prefixed("jsrun", "JSM_NAMESPACE"),
)
FLUX = Variables("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE")
#: `srun`, Flux and others set these variables, too, for programs that use MPICH's protocol.
PMI = Variables("PMI", *_PMI, absent=(_HYDRA[0], _PALS[0]))


# ---- torchrun, whose variables training operators of Kubernetes and users set, too ----


class Torchrun(Variables):
    """Processes that torchrun started, with local ranks. DeepSpeed and Azure ML imitate it."""

    def _port(self, environ: Environ) -> int:
        port = number(environ, self.port, 0)
        # torchrun itself listens at the port.
        uses = environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        return port + (1 if port < 65535 else -1) if uses and port else super()._port(environ)


class TrainJob(Variables):
    """Pods of a TrainJob, of which each may start torchrun. Their number may be a range."""

    def detect(self, environ: Environ) -> str:
        """Returns the variable of the rank if the number of pods is fixed."""
        return super().detect(environ) if environ.get(self.size, "").isdigit() else ""


_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = Torchrun("torchrun", *_RANKS, required="LOCAL_RANK")
#: A PyTorchJob has one process per pod. Users also set these variables for each process.
PYTORCH_JOB = Variables("MASTER_ADDR", *_RANKS, required="WORLD_SIZE", absent=("LOCAL_RANK",))
TRAIN_JOB = TrainJob(
    "TrainJob",
    "PET_NODE_RANK",
    "PET_NNODES",
    master="PET_MASTER_ADDR",
    port="PET_MASTER_PORT",
    required="PET_NNODES",
)


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
    master = joined(hosts[0], DEFAULT_PORT) if hosts and hosts[0] else ""
    return Cluster(name, rank, max(len(hosts), 1), master=master)
