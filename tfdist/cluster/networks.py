"""Finds addresses at which other hosts reach a host, and free ports.

TensorFlow listens on all interfaces, so ports must be free on all of them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
    """The addresses of a host.

    Attributes:
        interfaces: Address and network of active interfaces: `("10.0.0.1", "10.0.0.0/24")`. Those
            of IPv4 come first.
        default: The source address of the default route.
        name: Its own name, because containers on different hosts may have the same addresses.
    """

    interfaces: tuple[tuple[str, str], ...]
    default: str
    name: str = ""


def this_host() -> Host:
    """Returns the addresses of this host, without those that only this host can reach."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    active = [
        _interface(one.address, one.netmask)
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for one in addresses
        if name in up and one.family in (socket.AF_INET, socket.AF_INET6) and one.netmask
    ]
    usable = [one for one in active if not (one.ip.is_loopback or one.ip.is_link_local)]
    usable.sort(key=lambda one: one.version)
    interfaces = tuple((str(one.ip), str(one.network)) for one in usable)
    # By addresses that are reserved for documentation.
    default = _source("192.0.2.1") or _source("2001:db8::1") or _LOOPBACK
    return Host(interfaces, default, socket.gethostname())


def _interface(address: str, netmask: str) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    """Returns an interface. The module `ipaddress` accepts no IPv6 network masks."""
    address = address.partition("%")[0]
    prefix = int(ipaddress.ip_address(netmask)).bit_count()
    return ipaddress.ip_interface(f"{address}/{prefix}")


def reachable(hosts: Sequence[Host]) -> list[str]:
    """Returns for each worker an address of its host that all other hosts can reach.

    The address is in the first network that all hosts share. Addresses that several hosts have,
    such as those of container bridges, are skipped. Without a shared network, it is the source
    address of the default route.

    Args:
        hosts: By rank; a host appears once for each of its workers.

    Raises:
        ClusterError: A host has only loopback addresses, but there are other hosts.
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
    if lone := next((host for host in hosts if _is_loopback(host.default)), None):
        raise ClusterError(
            f"The host {lone.name!r} has no address that the other hosts can reach. Connect it to "
            "their network: ip addr; ip route."
        )
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


def _source(host: str) -> str:
    """Returns the source address of packets to a host; empty if there is no route."""
    try:
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, _, _, address in targets:
        with contextlib.suppress(OSError), socket.socket(family, kind) as udp_socket:
            udp_socket.connect(address)  # sends nothing
            return str(udp_socket.getsockname()[0])
    return ""


def check_loopback(host: str) -> None:
    """Checks that workers on this host can connect to each other.

    Args:
        host: Name or address of rank 0's host; others than this one are not checked.

    Raises:
        ClusterError: It is the loopback interface, which is down.
    """
    states = psutil.net_if_stats()
    if _is_loopback(host) and "lo" in states and not states["lo"].isup:
        raise ClusterError(
            "Workers on one host connect over the loopback interface, which is down here. Run: ip "
            "link set lo up."
        )


def check_own_name(is_alone: bool) -> None:
    """Checks that this host's name resolves to an address that the other workers can reach.

    Horovod 0.28.1 uses the given interface only for its first connections. For connections of
    process sets (`GlooContext::InitializeForProcessSet`), it resolves the host's own name, and
    crashes if that fails.

    Args:
        is_alone: Whether all workers are on this host.

    Raises:
        ClusterError: The name does not resolve, or resolves to a loopback address although there
            are other hosts.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)  # Horovod's Gloo uses IPv4 only
    except OSError:
        address = ""
    if not address or (address.startswith("127.") and not is_alone):
        entry = f"'127.0.0.1 {name}'" if is_alone else f"the host's address and {name!r}"
        raise ClusterError(
            f"This host's name {name!r} resolves to {address or 'no IPv4 address'}, but Horovod's "
            f"Gloo lets other workers connect to it. Add {entry} to /etc/hosts, or use --strategy "
            "multi_worker or --via mpirun."
        )


#: Variables with a proxy that gRPC uses.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def bypass_proxy(addresses: Iterable[str]) -> None:
    """Makes this process connect to other workers directly, also with a proxy in its environment.

    Args:
        addresses: `"host:port"` of the workers.
    """
    names = [*_PROXIES, *(name.upper() for name in _PROXIES)]
    if not any(os.environ.get(name) for name in names):
        return
    hosts = dict.fromkeys(split(address)[0] for address in addresses)
    # gRPC reads the first of these that is set, and Python's libraries the last.
    for name in ("no_grpc_proxy", "no_proxy"):
        before = os.environ.get(name, os.environ.get(name.upper(), ""))
        if before or name == "no_proxy":
            entries = dict.fromkeys(filter(None, [*map(str.strip, before.split(",")), *hosts]))
            os.environ[name] = ",".join(entries)


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
