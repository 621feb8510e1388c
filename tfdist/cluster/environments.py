"""Reads the cluster from the environment variables that launchers set.

Each `read_...(environ)` returns a `Cluster`, or None if the launcher's variables are not set.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from tfdist.cluster.record import Cluster, Environ, check_distinct, local_rank_and_size, number
from tfdist.errors import ClusterError


class _Tasks(BaseModel):
    model_config = ConfigDict(extra="forbid")
    chief: list[str] = Field([], max_length=1)
    worker: list[str] = []
    ps: list[str] = []
    evaluator: list[str] = []


class _Task(BaseModel):
    type: Literal["chief", "worker", "ps", "evaluator"]
    index: NonNegativeInt


class _Config(BaseModel):
    cluster: _Tasks
    task: _Task


def read_tf_config(environ: Environ) -> Cluster | None:
    """Returns the cluster that `TF_CONFIG` describes; an empty variable counts as not set.

    Users, launchers and Kubernetes' TFJob set it.

    Raises:
        ClusterError: It does not have the format of TensorFlow's guide on multi-worker training, or
            is inconsistent.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if not text.strip("{} "):
        return None
    try:
        config = _Config.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "value"
        raise ClusterError(
            f"TF_CONFIG: {place}: {first['msg']}; expected "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}.'
        ) from None
    return _from_config(config.cluster, config.task)


def _from_config(tasks: _Tasks, task: _Task) -> Cluster:
    """Returns the cluster of a validated configuration, whose parts may be inconsistent."""
    workers = (*tasks.chief, *tasks.worker)
    if not workers:
        raise ClusterError('TF_CONFIG has no "worker" or "chief" task: add one.')
    check_distinct("TF_CONFIG", (*workers, *tasks.ps, *tasks.evaluator))
    num_tasks = len(getattr(tasks, task.type))
    # TensorFlow omits the evaluator from the cluster, because no other task connects to it.
    is_evaluator = task.type == "evaluator" and not num_tasks and not task.index
    if task.index >= num_tasks and not is_evaluator:
        raise ClusterError(
            f"TF_CONFIG: task {task.type} {task.index}, but the cluster has {num_tasks} tasks of "
            f"that type. Use an index from 0 to {num_tasks - 1}."
            if num_tasks
            else f"TF_CONFIG: task {task.type} {task.index}, but the cluster has no such task."
        )
    first = {
        "chief": 0,
        "worker": len(tasks.chief),
        "ps": len(workers),
        "evaluator": len(workers) + len(tasks.ps),
    }
    rank = first[task.type] + task.index
    local = local_rank_and_size(workers, rank) if rank < len(workers) else (0, 1)
    return Cluster(
        "TF_CONFIG",
        rank,
        len(workers),
        *local,
        addresses=workers,
        task=task.type,
        ps=tuple(tasks.ps),
        has_chief=bool(tasks.chief),
    )


#: Ports below 32768, from which Linux assigns ports to clients. Each job step gets 64 ports, one
#: for each worker of a host, so that concurrent job steps do not collide.
_FIRST_PORT, _LAST_PORT, _PORTS_PER_STEP = 12000, 32000, 64


def read_slurm(environ: Environ) -> Cluster | None:
    """Returns the cluster of an `srun` step, whose addresses follow from its hosts.

    Variables of the step take precedence over those of the job. Under `mpirun` in a Slurm job, the
    variables describe the step that started mpirun's daemons, so this returns None.

    Raises:
        ClusterError: The variables are incomplete or inconsistent.
    """
    if "SLURM_PROCID" not in environ or _started_by_mpi(environ):
        return None
    size = number(environ, _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    rank, local_rank = number(environ, "SLURM_PROCID"), number(environ, "SLURM_LOCALID", 0)
    nodes = environ.get(_first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "")
    tasks_names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    tasks = environ.get(_first_set(environ, *tasks_names), "")
    hosts, counts = expand_hosts(nodes), expand_counts(tasks)
    if len(hosts) != len(counts) or sum(counts) != size:
        raise ClusterError(
            f"Slurm: {size} tasks, but the tasks per node are {tasks or 'unknown'!r} on nodes "
            f"{nodes or 'unknown'!r}. Start the workers with srun."
        )
    job, step = number(environ, "SLURM_JOB_ID", 0), _step(environ)
    port = _FIRST_PORT + (job * 16 + step) * _PORTS_PER_STEP % (_LAST_PORT - _FIRST_PORT)
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    if environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        places.sort(key=lambda place: place[1])  # round-robin over the nodes
    addresses = tuple(f"{hosts[node]}:{port + local}" for node, local in places)
    node = places[min(rank, size - 1)][0]
    here = environ.get("SLURMD_NODENAME", hosts[node])
    if here != hosts[node]:
        raise ClusterError(
            f"Slurm: task {rank} runs on {here}, expected {hosts[node]}. Start the workers with "
            "srun --distribution=block."
        )
    return Cluster("Slurm", rank, size, local_rank, counts[node], addresses)


def is_batch_script(environ: Environ) -> bool:
    """Returns whether this is the sbatch script itself, which has a task number but no step."""
    return "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" not in environ


def expand_hosts(nodelist: str) -> list[str]:
    """Expands Slurm's notation for hosts: `a[01-02,5],b` is a01, a02, a5, b.

    Raises:
        ClusterError: The syntax is invalid.
    """
    numbers = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
    names = re.findall(rf"(?:[^,\[\]]|{numbers})+", nodelist)
    if ",".join(names) != nodelist:
        raise ClusterError(f"Slurm's list of nodes {nodelist!r}: expected the form 'a[01-02,5],b'.")
    return list(itertools.chain.from_iterable(map(_expand, names)))


def expand_counts(tasks: str) -> list[int]:
    """Expands Slurm's notation for tasks per node: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        ClusterError: The syntax is invalid.
    """
    counts: list[int] = []
    for part in filter(None, tasks.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            raise ClusterError(f"Slurm's tasks per node {tasks!r}: expected the form '2(x3),1'.")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _expand(name: str) -> Iterator[str]:
    """Expands the first bracket of a name, and then the others recursively."""
    found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", name)
    if not found:
        yield name
        return
    for numbers in found[2].split(","):
        low, _, high = numbers.partition("-")
        for value in range(int(low), int(high or low) + 1):
            # Leading zeros are part of a name: 08-10 is 08, 09, 10.
            yield from _expand(f"{found[1]}{value:0{len(low)}d}{found[3]}")


def _first_set(environ: Environ, *names: str) -> str:
    """Returns the first of the variables that is set, or the last one."""
    return next((name for name in names if name in environ), names[-1])


def _step(environ: Environ) -> int:
    """Returns the step's number within its job; 0 if it has a name instead."""
    step = environ.get("SLURM_STEP_ID", "0")
    return int(step) if step.isdigit() else 0


#: Launcher, and its variables for rank, size, local rank and local size.
_MPI_VARIABLES = (
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MPICH / Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    (
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
)


def read_mpi(environ: Environ) -> Cluster | None:
    """Returns the cluster of `mpirun`, or of `horovodrun` without MPI. It has no addresses.

    Raises:
        ClusterError: The variables are incomplete or inconsistent.
    """
    for source, rank, size, local_rank, local_size in _MPI_VARIABLES:
        if rank in environ:
            return Cluster(
                source,
                number(environ, rank),
                number(environ, size),
                number(environ, local_rank, 0),
                number(environ, local_size, 1),
            )
    return None


def _started_by_mpi(environ: Environ) -> bool:
    """Returns whether an mpirun started this process.

    Slurm's srun also sets PMI_RANK, for programs that use MPICH's protocol, but no local ranks.
    """
    return any(environ.get(names[3]) is not None for names in _MPI_VARIABLES)


_KUBERNETES_PORT = 29500


def read_kubernetes(environ: Environ) -> Cluster | None:
    """Returns the cluster of a training operator's pods: ranks, and the address of rank 0.

    PyTorchJob sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does, which adds
    LOCAL_RANK. TrainJob sets PET_NODE_RANK, PET_NNODES, PET_MASTER_ADDR and PET_MASTER_PORT. TFJob
    sets TF_CONFIG.

    Raises:
        ClusterError: The variables are incomplete or inconsistent.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
        master = "MASTER_"
    elif "PET_NODE_RANK" in environ and environ.get("PET_NNODES", "").isdigit():
        rank, size = number(environ, "PET_NODE_RANK"), number(environ, "PET_NNODES")
        master = "PET_MASTER_"
    else:
        return None
    host = environ.get(f"{master}ADDR", "")
    port = number(environ, f"{master}PORT", _KUBERNETES_PORT)
    if size > 1 and not host:
        raise ClusterError(
            f"{size} workers, but ${master}ADDR is not set. Set it to the address of rank 0."
        )
    return Cluster(
        "Kubernetes",
        rank,
        size,
        number(environ, "LOCAL_RANK", 0),
        number(environ, "LOCAL_WORLD_SIZE", 1),
        master=f"{host}:{port}" if host else "",
    )
