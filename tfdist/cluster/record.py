"""The record of a cluster as one of its processes sees it, and what every reader of one needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster import cpu_binding
from tfdist.errors import ClusterError

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """Who the workers of a run are, and which of them this process is.

    Attributes:
        source: What told it, for the start-up table.
        rank: This worker's number, from 0. Parameter servers and evaluators are no workers: their
            numbers go on after the last worker's, so that no two processes share one.
        size: The number of workers; a chief is one of them.
        local_rank: This worker's number among those of its host.
        local_size: The number of workers on its host.
        addresses: `"host:port"` of each worker, by rank; empty where nobody has told them yet.
        task: What this process is: `"worker"`, `"chief"`, `"ps"` or `"evaluator"`.
        ps: `"host:port"` of each parameter server.
        has_chief: Whether the first address is a task of the type chief, not the first worker.
        master: `"host:port"` where rank 0 waits for the others; empty where there is none.
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
        """Whether this is rank 0, the worker that writes and talks."""
        return self.rank == 0

    @property
    def index(self) -> int:
        """This process's number among the tasks of its type, as TF_CONFIG counts them."""
        if self.task == "worker":
            return self.rank - self.has_chief
        return {
            "chief": 0,
            "ps": self.rank - self.size,
            "evaluator": self.rank - self.size - len(self.ps),
        }[self.task]

    @property
    def address(self) -> str:
        """This process's own `"host:port"`; empty where nobody has told it."""
        known = (*self.addresses, *self.ps) if self.addresses else ()
        return known[self.rank] if self.rank < len(known) else ""

    def tasks(self) -> dict[str, list[str]]:
        """Returns the addresses by type of task, as `tf.train.ClusterSpec` takes them."""
        chief, workers = self.addresses[: self.has_chief], self.addresses[self.has_chief :]
        named = {"chief": chief, "worker": workers, "ps": self.ps}
        return {task: list(addresses) for task, addresses in named.items() if addresses}

    def describe(self) -> dict[str, str]:
        """Returns what the start-up table says of this cluster."""
        who = f"rank {self.rank} of {self.size}"
        if self.task != "worker":
            who = f"{self.task} {self.index}, {self.size} workers"
        rows = {"cluster": f"{who}, {self.local_size} on this host, from {self.source}"}
        if self.addresses:
            rows["workers"] = ", ".join(self.addresses)
        if self.ps:
            rows["parameter servers"] = ", ".join(self.ps)
        return rows | cpu_binding.describe(self.local_size)


def split(address: str) -> tuple[str, int]:
    """Returns host and port of `"host:port"`; an IPv6 host stands in brackets.

    Raises:
        ClusterError: It is none.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ClusterError(
            f"Address {address!r}: expected host:port with a port from 1 to 65535, as in "
            "10.0.0.1:2222."
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_distinct(source: str, addresses: Sequence[str]) -> None:
    """Raises a ClusterError where two tasks have one address."""
    if twice := {address for address in addresses if addresses.count(address) > 1}:
        raise ClusterError(
            f"{source} gives {min(twice)} to two tasks: each needs an address of its own."
        )


def local_place(addresses: Sequence[str], rank: int) -> tuple[int, int]:
    """Returns local rank and local size: which of the addresses on the same host is `rank`'s."""
    hosts = [split(address)[0] for address in addresses]
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def number(environ: Environ, name: str, default: int | None = None) -> int:
    """Returns a variable that has to hold a number from 0.

    Raises:
        ClusterError: It holds something else, or is missing and has no default.
    """
    text = environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        came = f"got {text!r}" if text else "it is not set"
        raise ClusterError(
            f"${name}: expected a number from 0, {came}. Start the workers with one launcher."
        )
    return int(text)
