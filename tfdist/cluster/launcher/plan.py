"""Computes the processes of a run, with their hosts and environment variables.

For Horovod's Gloo controller, the variables and the rendezvous server are those of
`horovod.runner.gloo_run`, which would also start the processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import NamedTuple

from tfdist.cluster import gpus
from tfdist.cluster.networks import check_free, free_ports, listen_address
from tfdist.errors import ConfigurationError

LOCAL = "127.0.0.1"

#: A host name or an IPv4 address, and a number of workers.
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")


@dataclass(frozen=True)
class Process:
    """One process of a run.

    Attributes:
        name: Prefix of its output: `0`, or `ps 0` if there are several kinds of tasks.
        command: Program and arguments.
        environ: Environment variables in addition to the launcher's.
        host: The host that it runs on.
        ends_run: Whether the run is complete when this process exits with code 0.
        restartable: Whether it can be restarted without restarting the run.
        preempt_by: The signal that makes it stop after a step; 0: the signal that the launcher got.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    host: str = LOCAL
    ends_run: bool = False
    restartable: bool = False
    preempt_by: int = 0

    def line(self) -> str:
        """Returns the process as a shell command."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*variables, shlex.join(self.command)])


class Plan(NamedTuple):
    """The workers of a run.

    Attributes:
        processes: By rank.
        rendezvous: `"host:port"` of Horovod's rendezvous server.
    """

    processes: list[Process]
    rendezvous: str


def parse_hosts(text: str) -> dict[str, int]:
    """Parses the number of workers by host from `a:2,b:2`. The default is one worker.

    Raises:
        ConfigurationError: The syntax is invalid, or a host occurs twice.
    """
    hosts: dict[str, int] = {}
    # Host names are strictly checked, because they are written into shell commands and scripts.
    for entry in text.split(","):
        host, _, number = entry.strip().partition(":")
        if not _HOST.fullmatch(host) or host in hosts or not _COUNT.fullmatch(number or "1"):
            raise ConfigurationError(f"--hosts {text!r}: expected host:workers, as in a:2,b:2.")
        hosts[host] = int(number or 1)
    return hosts


def slots(hosts: Mapping[str, int]) -> list[Slot]:
    """Returns the slots of all workers, host by host."""
    local_ranks = [(host, local) for host, number in hosts.items() for local in range(number)]
    result = []
    for rank, (host, local) in enumerate(local_ranks):
        peers = [other for other, number in hosts.items() if number > local]
        result.append(
            Slot(host, rank, len(local_ranks), local, hosts[host], peers.index(host), len(peers))
        )
    return result


def ports_from(first: int, slots: Sequence[Slot]) -> list[int]:
    """Returns ports for `workers` that the launchers of all hosts can compute independently.

    Args:
        first: The port of the rendezvous. The ports of a host's workers follow it.
        slots: The slot of each worker.
    """
    return [first, *(first + 1 + slot.local_rank for slot in slots)]


def workers(
    command: Sequence[str],
    slots: Sequence[Slot],
    *,
    ports: Sequence[int] = (),
    interface: str = "",
    gpus_per_worker: int = 0,
    gpu_slots: Sequence[int] = (),
    here: str = LOCAL,
) -> Plan:
    """Returns the workers of a synchronous run.

    Each worker gets the environment variables of both TensorFlow (`TF_CONFIG`) and Horovod, because
    the launcher does not know which one the command uses.

    Args:
        command: The command of each worker.
        slots: The slot of each worker.
        ports: One for the rendezvous, and one for each worker on its host. If empty, free ports are
            used, and all workers are on this host.
        interface: The network interface between the workers; empty: Horovod chooses.
        gpus_per_worker: Number of GPUs visible to each worker; 0: all, which the workers of a host
            divide among themselves.
        gpu_slots: By rank, the local rank whose GPUs a worker gets; empty: the worker's local rank.
        here: This host's name among the slots. Its workers use the GPUs that are visible to this
            process; on other hosts, GPUs are counted from 0.

    Raises:
        ConfigurationError: This host has too few GPUs.
    """
    first = slots[0].host
    rendezvous, *worker_ports = ports or free_ports(1 + len(slots))
    tasks = {
        "worker": [f"{slot.host}:{port}" for slot, port in zip(slots, worker_ports, strict=True)]
    }
    processes = []
    for slot in slots:
        environ = tf_config(tasks, "worker", slot.rank)
        if horovod_installed():
            network = "lo" if first == LOCAL else interface
            environ |= horovod_environ(slot, first, rendezvous, network)
        if gpus_per_worker:
            local_rank = gpu_slots[slot.rank] if gpu_slots else slot.local_rank
            first_gpus = range((local_rank + 1) * gpus_per_worker)
            elsewhere = {gpus.VISIBLE: ",".join(map(str, first_gpus))}
            visible_to = os.environ if slot.host == here else elsewhere
            environ |= gpus.assigned(gpus_per_worker, local_rank, visible_to)
        processes.append(Process(str(slot.rank), tuple(command), environ, slot.host))
    return Plan(processes, f"{first}:{rendezvous}")


@contextlib.contextmanager
def rendezvous(planned: Plan, slots: Sequence[Slot]) -> Iterator[None]:
    """Runs Horovod's rendezvous server on this host within the block, if Horovod is installed.

    Raises:
        ClusterError: The port is in use.
    """
    if not horovod_installed():
        yield
        return
    check_free(planned.rendezvous)
    with horovod_rendezvous(slots, int(planned.rendezvous.rpartition(":")[2])):
        yield


def with_parameter_servers(
    command: Sequence[str], num_workers: int, num_ps: int, gpus_per_worker: int = 0
) -> list[Process]:
    """Returns the processes of a run with parameter servers, on free ports of this host.

    It starts a chief, which runs the training script, in addition to workers and servers.

    Args:
        command: What each of them runs.
        num_workers: Number of workers, which compute gradients.
        num_ps: Number of parameter servers, which store the variables and use no GPU.
        gpus_per_worker: Number of GPUs visible to each worker; the chief and the servers see none.
            0: all processes see all GPUs, and each worker uses one of them.

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
            ends_run=task == "chief",
            restartable=task == "worker",
        )
        for task, addresses in tasks.items()
        for index in range(len(addresses))
    ]


def tf_config(tasks: Mapping[str, Sequence[str]], task: str, index: int) -> dict[str, str]:
    """Returns the environment variable `TF_CONFIG` of one task."""
    return {"TF_CONFIG": json.dumps({"cluster": tasks, "task": {"type": task, "index": index}})}


@dataclass(frozen=True)
class Slot:
    """The position of a worker, named as in MPI and Horovod: `cross` counts hosts."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def horovod_installed() -> bool:
    """Returns whether Horovod is installed, without importing it."""
    return find_spec("horovod") is not None


def horovod_environ(slot: Slot, server: str, port: int, interface: str) -> dict[str, str]:
    """Returns the environment variables of one worker.

    Args:
        slot: The slot of the worker.
        server: Address of the host that runs the rendezvous server.
        port: Port of that server.
        interface: The network interface between the workers; empty: Horovod chooses.
    """
    return {
        "HOROVOD_HOSTNAME": slot.host,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
    }


@contextlib.contextmanager
def horovod_rendezvous(slots: Sequence[Slot], port: int) -> Iterator[None]:
    """Runs Horovod's rendezvous server within the block, in a thread.

    The server has no authentication. If all workers are on one host, it therefore listens on the
    loopback address only.
    """
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http import http_server

    server = http_server.RendezvousHTTPServer(
        (listen_address([slot.host for slot in slots]), port), http_server.RendezvousHandler, False
    )
    server.init([SlotInfo(**_slot_info(slot)) for slot in slots])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _slot_info(slot: Slot) -> dict[str, int | str]:
    fields = asdict(slot)
    return {"hostname": fields.pop("host"), **fields}
