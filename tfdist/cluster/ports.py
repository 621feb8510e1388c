"""Ports of this machine. TensorFlow listens on all interfaces, so ports are asked for on all."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from tfdist.cluster.record import split
from tfdist.errors import ClusterError

#: Above what services are given by name, below what Kubernetes gives to its own.
_FIRST, _LAST = 10_000, 29_999
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100
#: Not Python's shared numbers: workers that are seeded alike would all draw one port.
_random = random.SystemRandom()


@contextlib.contextmanager
def held_ports(num_ports: int) -> Iterator[list[int]]:
    """Gives ports that nobody listens on, different ones, which nobody else is given meanwhile."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for one in sockets:
            _bind(one)
        yield [one.getsockname()[1] for one in sockets]


def free_ports(num_ports: int) -> list[int]:
    """Returns ports that nobody listened on a moment ago, different ones."""
    with held_ports(num_ports) as ports:
        return ports


def _bind(one: socket.socket) -> None:
    """Binds a socket to a port that the system gives to no connection that leaves it.

    It may be a while until somebody listens there; a port out of the system's own range would now
    and then be a connection's by then.
    """
    first_of_system = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _LAST + 1
    ports = range(_FIRST, min(_LAST + 1, first_of_system))
    for _ in range(_TRIES if ports else 0):
        with contextlib.suppress(OSError):
            return one.bind(("", _random.choice(ports)))
    one.bind(("", 0))


def check_free(address: str) -> None:
    """Makes sure that this process can listen at its own `"host:port"`.

    TensorFlow does not tell: its servers share a port with whoever allows it, and then wait for
    messages that the other one gets.

    Raises:
        ClusterError: Another process listens there.
    """
    port = split(address)[1]
    with socket.socket() as one:
        # What a process that ended left behind is no obstacle; one that listens still is.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError as error:
            raise ClusterError(
                f"This worker is to listen at {address}, but cannot ({error.strerror}): end what "
                "listens there, or give the worker another port."
            ) from None
