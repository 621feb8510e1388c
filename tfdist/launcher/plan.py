"""Which processes a run has, where, and what each is told about the others."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.cluster import gpus
from tfdist.cluster.ports import free_ports
from tfdist.errors import ConfigurationError

LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Process:
    """One process of a run.

    Attributes:
        name: What its lines of output begin with: `0`, or `ps 0` where there are several tasks.
        command: Program and arguments.
        environ: What it is told beyond the launcher's own variables.
        host: Where it runs.
        leads: Whether the run is over, and well, when this process ends well.
        may_return: Whether the run goes on without it, so that it can be started again.
        preempt_by: The signal by which it stops after a step; 0: the one that came.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    host: str = LOCAL
    leads: bool = False
    may_return: bool = False
    preempt_by: int = 0

    def line(self) -> str:
        """Returns it as a shell takes it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*variables, shlex.join(self.command)])


@dataclass(frozen=True)
class Slot:
    """The place of a worker, named as MPI and Horovod do: `cross` counts hosts."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse_hosts(text: str) -> dict[str, int]:
    """Returns the number of workers by host of `a:2,b:2`; a host alone has one.

    Raises:
        ConfigurationError: It is something else, or names a host twice.
    """
    hosts: dict[str, int] = {}
    for entry in text.split(","):
        host, _, number = entry.strip().partition(":")
        if not host or host in hosts or not (number or "1").isdecimal() or number == "0":
            raise ConfigurationError(f"--hosts {text}: expected host:workers, as in a:2,b:2.")
        hosts[host] = int(number or 1)
    return hosts


def slots(hosts: Mapping[str, int]) -> list[Slot]:
    """Returns the places of all workers, host by host."""
    places = [(host, local) for host, number in hosts.items() for local in range(number)]
    made = []
    for rank, (host, local) in enumerate(places):
        peers = [other for other, number in hosts.items() if number > local]
        made.append(
            Slot(host, rank, len(places), local, hosts[host], peers.index(host), len(peers))
        )
    return made


def with_servers(
    command: Sequence[str], num_workers: int, num_ps: int, gpus_per_worker: int = 0
) -> list[Process]:
    """Returns the processes of a run with parameter servers, on free ports of this host.

    One more than workers and servers: the chief, which runs the script for all of them.

    Args:
        command: What each of them runs.
        num_workers: Workers, which compute.
        num_ps: Parameter servers, which hold the variables and use no GPU.
        gpus_per_worker: GPUs of each worker's own, which neither the chief nor a server sees then;
            0: all see all, and each worker computes on one of them.

    Raises:
        ConfigurationError: This host has too few GPUs.
    """

    def visible_gpus(task: str, index: int) -> dict[str, str]:
        if not gpus_per_worker:
            return {}
        if task != "worker":
            return gpus.NONE_VISIBLE
        return gpus.assigned(gpus_per_worker, index, os.environ)

    ports = iter(free_ports(1 + num_workers + num_ps))
    counts = {"chief": 1, "worker": num_workers, "ps": num_ps}
    tasks = {
        task: [f"{LOCAL}:{next(ports)}" for _ in range(number)] for task, number in counts.items()
    }
    return [
        Process(
            name="chief" if task == "chief" else f"{task} {index}",
            command=tuple(command),
            environ=tf_config(tasks, task, index) | visible_gpus(task, index),
            leads=task == "chief",
            may_return=task == "worker",
        )
        for task, addresses in tasks.items()
        for index in range(len(addresses))
    ]


def tf_config(tasks: Mapping[str, Sequence[str]], task: str, index: int) -> dict[str, str]:
    """Returns the variable that TensorFlow and `tfdist.cluster` read, for one task."""
    return {"TF_CONFIG": json.dumps({"cluster": tasks, "task": {"type": task, "index": index}})}
