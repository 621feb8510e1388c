"""The variables of Slurm's srun: ranks, and the hosts of the step, from which addresses follow."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from tfdist.cluster.environments import mpi
from tfdist.cluster.record import Cluster, Environ, number
from tfdist.errors import ClusterError

#: Below 32768, where Linux begins to give ports to clients, and 64 apart, one for each worker of a
#: host, so that steps that run side by side do not collide.
_FIRST_PORT, _LAST_PORT, _APART = 12000, 32000, 64


def read(environ: Environ) -> Cluster | None:
    """Returns the cluster of an srun step.

    The variables of the step count; those of the job stand in for them. An mpirun inside of a job
    passes on the variables of the step that started its daemons: then it is mpirun that knows.

    Raises:
        ClusterError: The variables are incomplete or contradict each other.
    """
    if "SLURM_PROCID" not in environ or mpi.started_here(environ):
        return None
    size = number(environ, _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    rank, local_rank = number(environ, "SLURM_PROCID"), number(environ, "SLURM_LOCALID", 0)
    nodes = environ.get(_first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "")
    tasks = environ.get(_first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "")
    hosts, counts = expand_hosts(nodes), expand_counts(tasks)
    if len(hosts) != len(counts) or sum(counts) != size:
        raise ClusterError(
            f"Slurm: {size} tasks, but {tasks or 'nothing'!r} of them on the nodes "
            f"{nodes or 'unknown'!r}: start the workers with srun."
        )
    job, step = number(environ, "SLURM_JOB_ID", 0), _step(environ)
    port = _FIRST_PORT + (job * 16 + step) * _APART % (_LAST_PORT - _FIRST_PORT)
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    if environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
        places.sort(key=lambda place: place[1])  # dealt out to the nodes in turn
    addresses = tuple(f"{hosts[node]}:{port + local}" for node, local in places)
    node = places[min(rank, size - 1)][0]
    here = environ.get("SLURMD_NODENAME", hosts[node])
    if here != hosts[node]:
        raise ClusterError(
            f"Slurm: task {rank} runs on {here}, expected {hosts[node]}: start the workers with "
            "srun --distribution=block."
        )
    return Cluster("Slurm", rank, size, local_rank, counts[node], addresses)


def is_batch_script(environ: Environ) -> bool:
    """Tells whether this is the script that sbatch runs: it has a task's number, and no step."""
    return "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" not in environ


def expand_hosts(nodelist: str) -> list[str]:
    """Returns the hosts of Slurm's shorthand: `a[01-02,5],b` is a01, a02, a5, b.

    Raises:
        ClusterError: It is something else.
    """
    numbers = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
    names = re.findall(rf"(?:[^,\[\]]|{numbers})+", nodelist)
    if ",".join(names) != nodelist:
        raise ClusterError(f"Slurm's list of nodes {nodelist!r}: expected the form 'a[01-02,5],b'.")
    return list(itertools.chain.from_iterable(map(_expand, names)))


def expand_counts(tasks: str) -> list[int]:
    """Returns the tasks of each node of Slurm's shorthand: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        ClusterError: It is something else.
    """
    counts: list[int] = []
    for part in filter(None, tasks.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            raise ClusterError(f"Slurm's tasks per node {tasks!r}: expected the form '2(x3),1'.")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _expand(name: str) -> Iterator[str]:
    """One name, whose first bracket is replaced by each of its numbers, then the next one."""
    found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", name)
    if not found:
        yield name
        return
    for numbers in found[2].split(","):
        low, _, high = numbers.partition("-")
        for value in range(int(low), int(high or low) + 1):
            # Leading zeros are part of a name: 08-10 is 08, 09, 10.
            yield from _expand(f"{found[1]}{value:0{len(low)}d}{found[3]}")


def _first(environ: Environ, *names: str) -> str:
    """The first of the variables that is set, or the last one."""
    return next((name for name in names if name in environ), names[-1])


def _step(environ: Environ) -> int:
    """The step's number within its job; 0 where it has a name."""
    step = environ.get("SLURM_STEP_ID", "0")
    return int(step) if step.isdigit() else 0
