"""Which address of each host the other hosts can reach."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from tfdist.errors import ClusterError

_LOOPBACK = "127.0.0.1"


class Host(NamedTuple):
    """The IPv4 addresses of a host.

    Attributes:
        interfaces: Address and network, as in `("10.0.0.1", "10.0.0.0/24")`, of what is up.
        default: The address that packets to strangers leave from.
    """

    interfaces: tuple[tuple[str, str], ...]
    default: str


def this_host() -> Host:
    """Returns the addresses of this host but the loopback's."""
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
    """Returns for each host the address that all others reach.

    It lies in the first network that all of them share. An address that several hosts have, as the
    bridges of container engines do, leads nowhere. Where there is no such network, routers have to
    know the way, and it is the address that packets to strangers leave from.

    Args:
        hosts: By rank; the same host stands there once for each of its workers.
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


def interface_towards(host: str) -> str:
    """Returns the name of the network interface by which this host reaches another, or itself.

    Raises:
        ClusterError: It does not.
    """
    source = _source(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == source for one in addresses):
            return name
    raise ClusterError(f"This host does not reach {host!r}: see whether its name is known here.")


def _default() -> str:
    """The source address of the default route; without one, the loopback's."""
    return _source("192.0.2.1") or _LOOPBACK  # an address that documentation may use


def _source(host: str) -> str:
    """The address that packets to a host leave from; empty where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect((host, 9))  # of UDP: nothing is sent
        except OSError:
            return ""
        return str(one.getsockname()[0])
