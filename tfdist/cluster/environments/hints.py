"""Variables that say that there are several hosts or processes, without the rank of this one.

Schedulers set them for the batch script of an allocation, and platforms that tfdist does not know
for each process. In either case a process that finds no other source is one process. If that is not
what was meant, each process would train alone, so a warning names the variable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tfdist.cluster.record import Environ

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


def read(environ: Environ) -> Iterator[Hint]:
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


def indices(environ: Environ) -> Iterator[Hint]:
    """Yields the variables that number processes. They may also belong to independent ones."""
    for name, text in _INDICES.items():
        if environ.get(name, "").isdigit():
            yield Hint(name, f"{text} ({name}={environ[name]})")


def allocations(environ: Environ) -> Iterator[str]:
    """Yields a text about each scheduler whose script or shell this process belongs to."""
    for name, scheduler in _ALLOCATIONS.items():
        if name in environ:
            yield f"{scheduler}: batch script or shell, one process"


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
