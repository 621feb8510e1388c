"""The description of a cluster and of this process in it, and parsing helpers."""

from __future__ import annotations

import ipaddress
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.errors import ClusterError

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """The workers of a run, and the rank of this process.

    Example:
        >>> cluster = tfdist.cluster.discover({})
        >>> cluster.source, cluster.size
        ('one process', 1)

    Attributes:
        source: Where this information comes from: a launcher or flags.
        rank: Rank of this process. Parameter servers and evaluators are not workers; their ranks
            follow those of the workers.
        size: The number of workers, including the chief.
        local_rank: Rank of this worker among the workers on its host.
        local_size: The number of workers on its host.
        addresses: `"host:port"` of each worker, by rank; empty if they are unknown.
        task: The type of this process: `"worker"`, `"chief"`, `"ps"` or `"evaluator"`.
        ps: `"host:port"` of each parameter server.
        has_chief: Whether the first worker has the task type `"chief"`.
        master: `"host:port"` at which rank 0 listens for the other workers; empty if there is none.
        gpus: Indices of this worker's GPUs among the GPUs that it sees.
        environments: What each environment of this process says, if there are several; see
            `environments.decide`.
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
    environments: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        last = self.size + len(self.ps)
        if self.task in ("chief", "worker"):
            last = self.size - 1
        if not 0 <= self.rank <= last or self.size < 1:
            raise ClusterError(
                f"{self.source} has rank {self.rank} of {self.size} workers: "
                f"expected a rank from 0 to {self.size - 1}."
            )
        if not 0 <= self.local_rank < self.local_size:
            raise ClusterError(
                f"{self.source} has local rank {self.local_rank} of {self.local_size} workers on "
                f"this host: expected a local rank from 0 to {self.local_size - 1}."
            )
        for name in ("addresses", "ps"):
            bracketed = tuple(joined(*split(address)) for address in getattr(self, name))
            object.__setattr__(self, name, bracketed)
        if self.master:
            object.__setattr__(self, "master", joined(*split(self.master)))
        check_distinct(self.source, (*self.addresses, *self.ps))
        if self.addresses and len(self.addresses) != self.size:
            raise ClusterError(
                f"{self.source} has {len(self.addresses)} addresses for {self.size} workers: "
                "expected one per worker."
            )

    @property
    def num_tasks(self) -> int:
        """The number of workers and parameter servers."""
        return self.size + len(self.ps)

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
        """The `"host:port"` of this process; empty if it is unknown."""
        addresses = (*self.addresses, *self.ps) if self.addresses else ()
        return addresses[self.rank] if self.rank < len(addresses) else ""

    def tasks(self) -> dict[str, list[str]]:
        """Returns the addresses by task type, for `tf.train.ClusterSpec`."""
        chief, workers = self.addresses[: self.has_chief], self.addresses[self.has_chief :]
        named = {"chief": chief, "worker": workers, "ps": self.ps}
        return {task: list(addresses) for task, addresses in named.items() if addresses}

    def describe(self) -> dict[str, str]:
        """Returns the rows of the start-up table about this cluster."""
        task = f"rank {self.rank} of {self.size}"
        if self.task != "worker":
            task = f"{self.task} {self.index}, {self.size} workers"
        rows = {"cluster": f"{task}, {self.local_size} on this host, from {self.source}"}
        if self.addresses:
            rows["workers"] = ", ".join(self.addresses)
        if self.ps:
            rows["parameter servers"] = ", ".join(self.ps)
        return rows | self.describe_environments() | describe_binding(self.local_size)

    def describe_environments(self) -> dict[str, str]:
        """Returns a row about the environments of this process, if one of them was not used."""
        return {"environments": "; ".join(self.environments)} if self.environments else {}


def describe_binding(local_size: int) -> dict[str, str]:
    """Returns a row of the start-up table if a launcher leaves cores of this host idle.

    By default, Open MPI binds each rank to one core if there are at most two ranks.
    """
    from pipelines.cores import num_bound_cores  # not before commands put it before the user's

    num_cores = num_bound_cores()
    try:
        num_host_cores = num_bound_cores(os.getppid())  # the launcher is not bound
    except OSError:
        return {}
    if num_cores * local_size >= num_host_cores:
        return {}
    return {
        "cores": f"{num_cores} of {num_host_cores}: the launcher binds each worker to cores; use "
        "mpirun --bind-to none"
    }


def split(address: str) -> tuple[str, int]:
    """Splits `"host:port"`. An IPv6 host should be in brackets.

    Raises:
        ClusterError: The address is invalid.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_host = bool(host) and (":" not in host or _is_ipv6(host))
    if not (is_host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ClusterError(
            f"Address {address!r}: expected host:port with a port from 1 to 65535, as in "
            "10.0.0.1:2222 or [fd00::1]:2222."
        )
    return host, int(port)


def joined(host: str, port: int) -> str:
    """Returns `"host:port"`, with brackets around an IPv6 host, as TensorFlow needs them."""
    host = host.removeprefix("[").removesuffix("]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def check_distinct(source: str, addresses: Sequence[str]) -> None:
    """Raises a ClusterError if two tasks have the same address."""
    if duplicates := {address for address, number in Counter(addresses).items() if number > 1}:
        raise ClusterError(
            f"{source} has the address {min(duplicates)} for two tasks. Use a different one for "
            "each task."
        )


def local_rank_and_size(addresses: Sequence[str], rank: int) -> tuple[int, int]:
    """Returns the local rank and local size of `rank`, from the hosts in the addresses."""
    hosts = [split(address)[0] for address in addresses]
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def number(environ: Environ, name: str, default: int | None = None) -> int:
    """Parses an environment variable that contains a number.

    Raises:
        ClusterError: The value is not an integer of at least 0, or is missing without a default.
    """
    text = environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        problem = f"got {text!r}" if text else "it is not set"
        raise ClusterError(
            f"${name}: expected a number of at least 0, {problem}. Start the workers with one "
            "launcher."
        )
    return int(text)
