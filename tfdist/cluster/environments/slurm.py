"""A step that Slurm's `srun` started. The batch script itself is one process, without a step."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from tfdist.cluster.record import Cluster, Environ, joined, local_rank_and_size, number
from tfdist.errors import ClusterError

#: Ports below 32768, from which Linux assigns ports to clients. Each job step gets 64 ports, one
#: for each worker of a host, so that concurrent job steps do not collide.
_FIRST_PORT, _LAST_PORT, _PORTS_PER_STEP = 12000, 32000, 64

#: The variable of the rank.
RANK = "SLURM_PROCID"


class Slurm:
    """A task of a step. The addresses of the other tasks follow from its hosts.

    In a step over several components of a heterogeneous job, the variables describe all of them.
    """

    name = "Slurm"

    def detect(self, environ: Environ) -> str:
        """Returns the variable of the rank in a step; only a step has `SLURM_STEP_...`."""
        steps = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
        in_step = RANK in environ and any(name in environ for name in steps)
        return RANK if in_step else ""

    def read(self, environ: Environ) -> Cluster:
        """Returns the cluster of the step; variables of the job stand in for missing ones.

        Raises:
            ClusterError: The variables are incomplete or inconsistent.
        """
        size = number(environ, _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
        rank = number(environ, RANK)
        if size == 1 and rank == 0:
            return Cluster(self.name, rank, size)
        nodes = environ.get(_first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "")
        names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        tasks = environ.get(_first_set(environ, *names), "")
        hosts, counts = expand_hosts(nodes), expand_counts(tasks)
        if len(hosts) != len(counts) or sum(counts) != size:
            raise ClusterError(
                f"Slurm: {size} tasks, but the tasks per node are {tasks or 'unknown'!r} on nodes "
                f"{nodes or 'unknown'!r}. Start the workers with srun."
            )
        slots = [
            (host, turn) for host, count in zip(hosts, counts, strict=True) for turn in range(count)
        ]
        if environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):
            slots.sort(key=lambda slot: slot[1])  # round-robin over the nodes
        host_of = [host for host, _ in slots]
        expected = host_of[min(rank, size - 1)]
        here = environ.get("SLURMD_NODENAME", expected)
        if here != expected:
            raise ClusterError(
                f"Slurm: task {rank} runs on {here}, expected {expected}. Start the workers with "
                "srun --distribution=block."
            )
        # Interactive steps have a number beyond all others.
        step = environ.get("SLURM_STEP_ID", "0")
        job = number(environ, "SLURM_JOB_ID", 0)
        offset = (job * 16 + (int(step) if step.isdigit() else 0)) * _PORTS_PER_STEP
        # Tasks on one host have consecutive ports.
        used: dict[str, Iterator[int]] = {
            host: itertools.count(_FIRST_PORT + offset % (_LAST_PORT - _FIRST_PORT))
            for host in host_of
        }
        addresses = tuple(joined(host, next(used[host])) for host in host_of)
        local = local_rank_and_size(addresses, rank) if rank < size else (0, 1)
        return Cluster(self.name, rank, size, *local, addresses)


def is_interactive(environ: Environ) -> bool:
    """Returns whether the step is an interactive shell, of which only the first task runs."""
    return "SLURM_PTY_PORT" in environ


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
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ClusterError(f"Slurm's tasks per node {tasks!r}: expected the form '2(x3),1'.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand(name: str) -> Iterator[str]:
    """Expands the first bracket of a name, and then the others recursively."""
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", name)
    if not match:
        yield name
        return
    for numbers in match[2].split(","):
        low, _, high = numbers.partition("-")
        for value in range(int(low), int(high or low) + 1):
            # Leading zeros are part of a name: 08-10 is 08, 09, 10.
            yield from _expand(f"{match[1]}{value:0{len(low)}d}{match[3]}")


def _first_set(environ: Environ, *names: str) -> str:
    return next((name for name in names if name in environ), names[-1])
