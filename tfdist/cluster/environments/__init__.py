"""Reads who this process is from the environment variables of launchers and platforms.

`decide` reads every environment in `TABLE`, and uses the first one that applies. The order is that
of nesting: a launcher that starts the processes of a host comes before the one that started it.
The others must agree with it. `docs/clusters.md` has a row for each environment.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tfdist.cluster.environments import base, slurm
from tfdist.cluster.environments.base import Environment
from tfdist.cluster.environments.tf_config import TfConfig, VertexAi
from tfdist.cluster.record import Cluster, Environ
from tfdist.errors import ClusterError

#: In order of precedence.
TABLE: Sequence[Environment] = (
    base.TORCHRUN,  # started by any of the following, on each host
    TfConfig(several=True),  # of tfdist's launcher, a user or a platform
    *base.MPI,
    base.PYTORCH_JOB,
    base.FLUX,
    slurm.Slurm(),
    base.PMI,
    base.TRAIN_JOB,
    base.SkyPilot(),
    base.DSTACK,
    base.LEADER_WORKER_SET,
    base.SageMaker(),
    base.Volcano(),
    VertexAi(),
    TfConfig(several=False),
)


class Reading(NamedTuple):
    """What an environment says.

    Attributes:
        variable: A variable without which the environment would not apply.
        cluster: What it says.
    """

    variable: str
    cluster: Cluster

    def __str__(self) -> str:
        return f"{self.cluster.source}: rank {self.cluster.rank} of {self.cluster.num_tasks}"


def readings(environ: Environ) -> list[Reading]:
    """Returns what each environment that applies says, in order of precedence.

    Raises:
        ClusterError: The variables of one are incomplete or inconsistent.
    """
    detected = ((environment, environment.detect(environ)) for environment in TABLE)
    return [Reading(name, environment.read(environ)) for environment, name in detected if name]


def decide(environ: Environ) -> Cluster:
    """Returns the cluster of the environment with the highest precedence.

    Raises:
        ClusterError: The variables of an environment are incomplete or inconsistent, or two
            environments disagree.
    """
    applicable = readings(environ)
    if not applicable:
        schedulers = [scheduler for name, scheduler in _ALLOCATIONS.items() if name in environ]
        allocations = [f"{one}: batch script or shell, one process" for one in schedulers]
        texts = (*allocations, *_hint_texts(environ, applicable))
        return Cluster("one process", rank=0, size=1, environments=texts)
    first, *others = applicable
    for other in others:
        is_shell = other.variable == slurm.RANK and slurm.is_interactive(environ)
        if not (is_shell or _agree(first.cluster, other.cluster)):
            raise ClusterError(
                f"{first}, but {other}. If {first.cluster.source} should connect all processes, "
                "start it once for all of them. Otherwise ignore one of the two: unset "
                f"{other.variable}, or unset {first.variable}."
            )
    texts = (f"{first} (used)", *map(str, others), *_hint_texts(environ, applicable))
    return dataclasses.replace(first.cluster, environments=texts if len(texts) > 1 else ())


def _agree(near: Cluster, far: Cluster) -> bool:
    """Returns whether an environment agrees with one of lower precedence.

    That one may describe the same processes, or those that started a part of them each: one, or one
    per host, or MPI's daemons. A launcher whose processes are all on this host has not connected
    those of the other, which would train separately.
    """
    if far.num_tasks == 1:
        return True
    if near.num_tasks == far.num_tasks:
        same_hosts = {_on_one_host(near), _on_one_host(far)} != {True, False}
        return (near.rank == far.rank and same_hosts) or bool(near.ps)
    if near.task == "evaluator":  # it is not counted
        return near.num_tasks + 1 == far.num_tasks
    return near.local_size < near.size and far.num_tasks < near.num_tasks


def _on_one_host(cluster: Cluster) -> bool | None:
    """Returns whether all workers are on this host; None if that is unknown."""
    if cluster.local_size == cluster.size:
        return True
    return False if cluster.addresses or cluster.local_size > 1 else None


def warning(environ: Environ) -> str:
    """Returns a warning if variables say that there are other processes or hosts; empty if not.

    Raises:
        ClusterError: As for `decide`.
    """
    cluster, hinted = decide(environ), _unexplained(environ, readings(environ))
    if cluster.rank or not hinted:
        return ""
    alone = "this process trains alone" if cluster.size == 1 else "all workers are on this host"
    return (
        f"{', '.join(hint.text for hint in hinted)}, but {alone} ({cluster.source}: rank "
        f"{cluster.rank} of {cluster.size}). To train on all of them, start the workers with srun, "
        "mpirun, torchrun or python -m tfdist.launch, or set TF_CONFIG. Otherwise ignore this, or "
        f"unset {hinted[0].variable}."
    )


def _hint_texts(environ: Environ, applicable: Sequence[Reading]) -> tuple[str, ...]:
    return tuple(f"{hint.text} (no rank)" for hint in _unexplained(environ, applicable))


def _unexplained(environ: Environ, applicable: Sequence[Reading]) -> list[Hint]:
    """Returns the hints at more processes or hosts than the environments have."""
    if not applicable:
        # Variables that number processes may also belong to independent ones.
        indices = [
            Hint(name, f"{text} ({name}={environ[name]})")
            for name, text in _INDICES.items()
            if environ.get(name, "").isdigit()
        ]
        return list(_hints(environ)) or indices
    cluster = applicable[0].cluster
    on_one_host = cluster.local_size == cluster.size
    # Other variables of an environment that was read are no news.
    families = {family for one in applicable if (family := one.variable.partition("_")[0])}
    return [
        hint
        for hint in _hints(environ)
        if hint.variable.partition("_")[0] not in families
        and (hint.number > cluster.num_tasks or (hint.is_hosts and on_one_host))
    ]


def read_mpi(environ: Environ) -> Cluster | None:
    """Returns what the launcher of MPI programs says that started this process, if any."""
    launcher = next((one for one in (*base.MPI, base.PMI) if one.detect(environ)), None)
    return launcher.read(environ) if launcher else None


# ---- hints ----
# Variables that say that there are several hosts or processes, without the rank of this one.
# Schedulers set them for the batch script of an allocation, and platforms that tfdist does not know
# for each process. In either case a process that finds no other source is one process. If that is
# not what was meant, each process would train alone, so a warning names the variable.


#: Ends of variables with a number of hosts or processes, for platforms that no table knows.
_HOSTS = re.compile(
    r"(.*_)?(NUM_NODES|NODES_NUM|NNODES|NODE_COUNT|NUM_HOSTS|NHOSTS|NUM_MACHINES|MACHINES_NUM)"
)
_PROCESSES = re.compile(
    r"(.*_)?(WORLD_SIZE|NUM_TRAINERS|TRAINERS_NUM|TOTAL_WORKERS|TRAIN_WORKER_NUM)"
)
#: Variables that some platforms set for each of several processes; they contain an index.
_INDICES = {
    "JOB_COMPLETION_INDEX": "Kubernetes started a pod of an indexed job",
    "PMIX_RANK": "a launcher with PMIx started this process",
    "NODE_RANK": "a launcher started a process on each node",
    "RANK": "a launcher started this process",
    "PBS_VNODENUM": "pbsdsh started this process",
    "LSF_PM_TASKID": "blaunch started this process",
    "VC_TASK_INDEX": "Volcano started a pod of a job with several kinds of tasks",
}
#: Variables of batch schedulers that are set in the whole allocation.
_ALLOCATIONS = {
    "SLURM_JOB_ID": "Slurm",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "PE_HOSTFILE": "SGE",
    "OAR_JOB_ID": "OAR",
}
_DETERMINED = Path("/run/determined/info/rendezvous.json")


class Hint(NamedTuple):
    """A variable that says that there are several processes or hosts.

    Attributes:
        variable: Its name.
        text: What it says, such as `"PBS_NUM_NODES=2"`.
        number: How many; 0: unknown.
        is_hosts: Whether these are hosts, each with one or more processes.
    """

    variable: str
    text: str
    number: int = 0
    is_hosts: bool = False


def _hints(environ: Environ) -> Iterator[Hint]:
    """Yields the variables that say that there are several hosts or processes."""
    for name, value in environ.items():
        is_hosts = bool(_HOSTS.fullmatch(name))
        if name in _LISTS and (number := _LISTS[name](value)) > 1:
            yield Hint(name, f"${name} lists {number} hosts", number, is_hosts=True)
        elif is_hosts or (_PROCESSES.fullmatch(name) and "LOCAL" not in name):
            low, _, high = value.strip().partition(":")  # elastic jobs have a range
            if (high or low).isdigit() and int(high or low) > 1:
                yield Hint(name, f"{name}={value.strip()}", int(high or low), is_hosts)
    if "DET_ALLOCATION_ID" in environ and (number := _num_containers()) > 1:
        yield Hint("DET_ALLOCATION_ID", f"Determined started {number} containers", number, True)


def _distinct_lines(path: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    return len({line.split()[0] for line in lines if line.split()})


def _num_containers() -> int:
    try:
        return len(json.loads(_DETERMINED.read_text())["container_addrs"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


#: Variables that list hosts, and the function that returns their number.
_LISTS: dict[str, Callable[[str], int]] = {
    "PBS_NODEFILE": _distinct_lines,
    "PE_HOSTFILE": _distinct_lines,
    "OAR_NODEFILE": _distinct_lines,
    "COBALT_NODEFILE": _distinct_lines,
    "LSB_MCPU_HOSTS": lambda text: len(text.split()) // 2,
    "LSB_HOSTS": lambda text: len(set(text.split())),
    "AZ_BATCH_HOST_LIST": lambda text: len(set(text.split(","))),
    "AZ_BATCH_NODE_LIST": lambda text: len(set(text.split(";"))),
}
