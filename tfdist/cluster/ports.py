"""Ports of this machine. TensorFlow listens on all interfaces, so ports are asked for on all."""

from __future__ import annotations

import contextlib
import socket

from tfdist.cluster.record import split
from tfdist.errors import ClusterError


def free_ports(num_ports: int) -> list[int]:
    """Returns ports that nobody listens on, different ones, chosen by the system."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for one in sockets:  # all are held until the last is found
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


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
