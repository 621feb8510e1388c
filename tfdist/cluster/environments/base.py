"""What an environment is, and the environments whose variables are numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tfdist.cluster.record import Cluster, Environ, joined, number
from tfdist.errors import ClusterError

#: Where rank 0 listens if the environment names its host only.
DEFAULT_PORT = 29500


class Environment(Protocol):
    """A launcher or platform that tells a process its rank by environment variables.

    Attributes:
        name: Its name in tables and messages.
    """

    @property
    def name(self) -> str: ...

    def detect(self, environ: Environ) -> str:
        """Returns a variable without which it would not apply; empty if it does not apply."""

    def read(self, environ: Environ) -> Cluster:
        """Returns the cluster that it describes.

        Raises:
            ClusterError: The variables are incomplete or inconsistent.
        """


@dataclass(frozen=True)
class Variables:
    """An environment with a variable for each number.

    Attributes:
        name: Its name.
        rank: Variable with the rank of a process.
        size: Variable with the number of processes.
        local_rank: Variable with the rank on the host; not set: 0.
        local_size: Variable with the number of processes on the host; not set: as few as possible.
        master: Variable with the host of rank 0; empty: the environment has none.
        port: Variable with the port at which rank 0 listens.
        required: A further variable without which the environment does not apply.
        absent: Variables with which it does not apply, because another environment set its own.
    """

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    master: str = ""
    port: str = ""
    required: str = ""
    absent: tuple[str, ...] = ()

    def detect(self, environ: Environ) -> str:
        """Returns the variable of the rank if it is set."""
        if self.required and self.required not in environ:
            return ""
        applies = bool(environ.get(self.rank)) and not any(name in environ for name in self.absent)
        return self.rank if applies else ""

    def read(self, environ: Environ) -> Cluster:
        """Returns the cluster.

        Raises:
            ClusterError: A variable is missing or not a number.
        """
        size, host = number(environ, self.size), environ.get(self.master, "")
        local_rank = number(environ, self.local_rank, 0)
        if self.master and size > 1 and not host:
            raise ClusterError(
                f"{size} workers, but ${self.master} is not set. Set it to the address of rank 0."
            )
        return Cluster(
            self.name,
            number(environ, self.rank),
            size,
            local_rank,
            number(environ, self.local_size, local_rank + 1),
            master=joined(host, self._port(environ)) if host else "",
        )

    def _port(self, environ: Environ) -> int:
        return number(environ, self.port, DEFAULT_PORT)
