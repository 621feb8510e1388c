"""Finds addresses at which other hosts reach a host, and free ports.

TensorFlow listens on all interfaces, so ports must be free on all of them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tfdist.cluster.record import split
from tfdist.errors import ClusterError

_LOOPBACK = "127.0.0.1"

#: Above well-known ports, below the ports that Kubernetes assigns to services.
_FIRST_PORT, _LAST_PORT = 10_000, 29_999
_SYSTEM_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100
#: Not Python's global generator, which would draw the same ports in workers with the same seed.
_random = random.SystemRandom()


class Host(NamedTuple):
    """The IPv4 addresses of a host.

    Attributes:
        interfaces: Address and network of active interfaces: `("10.0.0.1", "10.0.0.0/24")`.
        default: The source address of the default route.
    """

    interfaces: tuple[tuple[str, str], ...]
    default: str


def this_host() -> Host:
    """Returns the addresses of this host, without loopback."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        ipaddress.IPv4Interface(f"{one.address}/{one.netmask}")
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for one in addresses
        if name in up and one.family == socket.AF_INET and one.netmask
    ]
    interfaces = tuple((str(one.ip), str(one.network)) for one in found if not one.is_loopback)
    return Host(interfaces, _default())


def reachable(hosts: Sequence[Host]) -> list[str]:
    """Returns for each worker an address of its host that all other hosts can reach.

    The address is in the first network that all hosts share. Addresses that several hosts have,
    such as those of container bridges, are skipped. Without a shared network, it is the source
    address of the default route.

    Args:
        hosts: By rank; a host appears once for each of its workers.
    """
    distinct = set(hosts)
    if len(distinct) == 1:
        return [_LOOPBACK] * len(hosts)
    owners = Counter(address for host in distinct for address, _ in host.interfaces)
    by_network = {
        host: {network: ip for ip, network in reversed(host.interfaces) if owners[ip] == 1}
        for host in distinct
    }
    for _, network in hosts[0].interfaces:
        if all(network in networks for networks in by_network.values()):
            return [by_network[host][network] for host in hosts]
    return [host.default for host in hosts]


def listen_address(hosts: Sequence[str]) -> str:
    """Returns the address at which this host should listen.

    Args:
        hosts: Names or addresses of all hosts; the first one is this host.

    Returns:
        A loopback address if all hosts are loopback addresses; the first entry if it is an address
        of this host; otherwise an empty string, for all interfaces, because other hosts may resolve
        a name to another interface of this host.
    """
    if all(_is_loopback(host) for host in hosts):
        return _LOOPBACK if hosts[0] == "localhost" else hosts[0]
    local = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    return hosts[0] if hosts[0] in local and not _is_loopback(hosts[0]) else ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interface_towards(host: str) -> str:
    """Returns the name of the network interface through which this host reaches another host.

    Raises:
        ClusterError: There is no route to the host.
    """
    source = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == source for one in addresses):
            return name
    raise ClusterError(f"This host has no interface with the address {source}.")


def address_towards(host: str) -> str:
    """Returns the address of this host from which it reaches another host.

    Raises:
        ClusterError: There is no route to the host.
    """
    if source := _source(host):
        return source
    raise ClusterError(f"Cannot reach {host!r} from this host. Check that the name resolves here.")


def _default() -> str:
    """Returns the source address of the default route, or the loopback address without one."""
    return _source("192.0.2.1") or _LOOPBACK  # an address reserved for documentation


def _source(host: str) -> str:
    """Returns the source address of packets to a host; empty if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket:
        try:
            udp_socket.connect((host, 9))  # sends nothing
        except OSError:
            return ""
        return str(udp_socket.getsockname()[0])


@contextlib.contextmanager
def reserved_ports(num_ports: int) -> Iterator[list[int]]:
    """Yields distinct free ports, and reserves them for this process within the block."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for sock in sockets:
            _bind(sock)
        yield [sock.getsockname()[1] for sock in sockets]


def free_ports(num_ports: int) -> list[int]:
    """Returns distinct ports that are currently free."""
    with reserved_ports(num_ports) as ports:
        return ports


def _bind(sock: socket.socket) -> None:
    """Binds a socket to a port outside of the system's range for outgoing connections.

    Until a server listens at the port, an outgoing connection could get a port in that range.
    """
    has_range = _SYSTEM_RANGE.exists()
    first_of_system = int(_SYSTEM_RANGE.read_text().split()[0]) if has_range else _LAST_PORT + 1
    ports = range(_FIRST_PORT, min(_LAST_PORT + 1, first_of_system))
    for _ in range(_TRIES if ports else 0):
        with contextlib.suppress(OSError):
            return sock.bind(("", _random.choice(ports)))
    sock.bind(("", 0))


def check_free(address: str) -> None:
    """Checks that this process can listen at its `"host:port"`.

    TensorFlow does not check it: its servers share the port with another process if that one allows
    it, and then wait for messages that the other process receives.

    Raises:
        ClusterError: Another process listens at the port.
    """
    port = split(address)[1]
    with socket.socket() as one:
        # Ignores closed connections of an ended process, but not a listener.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError as error:
            raise ClusterError(
                f"This worker cannot listen at {address} ({error.strerror}). Stop the process that "
                "listens there, or choose another port for the worker."
            ) from None
