"""The record of a cluster as one of its processes sees it, and helpers to read one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.errors import ClusterError

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """The workers of a run, and which of them this process is.

    Example:
        >>> cluster = tfdist.cluster.discover({})
        >>> cluster.source, cluster.size
        ('one process', 1)

    Attributes:
        source: The launcher or flags that said so, for the start-up table.
        rank: This worker's rank. Ranks of parameter servers and evaluators, which are no workers,
            follow the last worker's, so that all processes have distinct ranks.
        size: The number of workers; a chief is one of them.
        local_rank: This worker's number among those of its host.
        local_size: The number of workers on its host.
        addresses: `"host:port"` of each worker, by rank; empty until they are known.
        task: The type of this process: `"worker"`, `"chief"`, `"ps"` or `"evaluator"`.
        ps: `"host:port"` of each parameter server.
        has_chief: Whether the first address is a task of the type chief, not the first worker.
        master: `"host:port"` where rank 0 listens for the others; empty if there is none.
        gpus: Positions of the GPUs that this worker uses, among those it sees.
    """

    source: str
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    addresses: tuple[str, ...] = ()
    task: str = "worker"
    ps: tuple[str, ...] = ()
    has_chief: bool = False
    master: str = ""
    gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        last = self.size + len(self.ps)
        if self.task in ("chief", "worker"):
            last = self.size - 1
        if not 0 <= self.rank <= last or self.size < 1:
            raise ClusterError(
                f"{self.source} says rank {self.rank} of {self.size} workers: "
                f"ranks go from 0 to {self.size - 1}."
            )
        if not 0 <= self.local_rank < self.local_size:
            raise ClusterError(
                f"{self.source} says local rank {self.local_rank} of {self.local_size} workers on "
                f"this host: local ranks go from 0 to {self.local_size - 1}."
            )
        for address in (*self.addresses, *self.ps, *filter(None, [self.master])):
            split(address)
        check_distinct(self.source, (*self.addresses, *self.ps))
        if self.addresses and len(self.addresses) != self.size:
            raise ClusterError(
                f"{self.source} names {len(self.addresses)} addresses for {self.size} workers: "
                "expected one each."
            )

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which writes files and prints progress."""
        return self.rank == 0

    @property
    def index(self) -> int:
        """The index of this process among the tasks of its type, as in TF_CONFIG."""
        if self.task == "worker":
            return self.rank - self.has_chief
        return {
            "chief": 0,
            "ps": self.rank - self.size,
            "evaluator": self.rank - self.size - len(self.ps),
        }[self.task]

    @property
    def address(self) -> str:
        """This process's own `"host:port"`; empty if it is not known."""
        known = (*self.addresses, *self.ps) if self.addresses else ()
        return known[self.rank] if self.rank < len(known) else ""

    def tasks(self) -> dict[str, list[str]]:
        """Returns the addresses by type of task, as `tf.train.ClusterSpec` takes them."""
        chief, workers = self.addresses[: self.has_chief], self.addresses[self.has_chief :]
        named = {"chief": chief, "worker": workers, "ps": self.ps}
        return {task: list(addresses) for task, addresses in named.items() if addresses}

    def describe(self) -> dict[str, str]:
        """Returns the rows of the start-up table about this cluster."""
        who = f"rank {self.rank} of {self.size}"
        if self.task != "worker":
            who = f"{self.task} {self.index}, {self.size} workers"
        rows = {"cluster": f"{who}, {self.local_size} on this host, from {self.source}"}
        if self.addresses:
            rows["workers"] = ", ".join(self.addresses)
        if self.ps:
            rows["parameter servers"] = ", ".join(self.ps)
        return rows | describe_binding(self.local_size)


def describe_binding(local_size: int) -> dict[str, str]:
    """Returns a row of the start-up table if a launcher leaves cores of this host idle.

    By default Open MPI binds each rank to one core where there are at most two ranks.

    Args:
        local_size: Workers on this host.
    """
    own = len(os.sched_getaffinity(0))
    try:
        host = len(os.sched_getaffinity(os.getppid()))  # of the launcher, which is not bound
    except OSError:
        return {}
    if own * local_size >= host:
        return {}
    return {"cores": f"{own} of {host}: the launcher binds each worker; use mpirun --bind-to none"}


def split(address: str) -> tuple[str, int]:
    """Returns host and port of `"host:port"`; an IPv6 host is in brackets.

    Raises:
        ClusterError: The text has another form.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ClusterError(
            f"Address {address!r}: expected host:port with a port from 1 to 65535, as in "
            "10.0.0.1:2222."
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_distinct(source: str, addresses: Sequence[str]) -> None:
    """Raises a ClusterError if two tasks have the same address."""
    if twice := {address for address, number in Counter(addresses).items() if number > 1}:
        raise ClusterError(
            f"{source} gives {min(twice)} to two tasks: each needs an address of its own."
        )


def local_place(addresses: Sequence[str], rank: int) -> tuple[int, int]:
    """Returns local rank and local size: the position of `rank` among the addresses of its host."""
    hosts = [split(address)[0] for address in addresses]
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def number(environ: Environ, name: str, default: int | None = None) -> int:
    """Returns the number in a variable.

    Raises:
        ClusterError: It is no number of at least 0, or is missing without a default.
    """
    text = environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        found = f"got {text!r}" if text else "it is not set"
        raise ClusterError(
            f"${name}: expected a number of at least 0, {found}. Start the workers with one "
            "launcher."
        )
    return int(text)
