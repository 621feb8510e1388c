"""Selection of addresses that all hosts can reach."""

from __future__ import annotations

import pytest

from tfdist.cluster.networks import Host, interface_towards, reachable, this_host
from tfdist.errors import ClusterError

BRIDGE = ("172.17.0.1", "172.17.0.0/16")


def host(*addresses: str, default: str = "") -> Host:
    interfaces = [(one, f"{one.rpartition('.')[0]}.0/24") for one in addresses]
    return Host((BRIDGE, *interfaces), default or addresses[0])


def test_workers_of_one_host_use_the_loopback() -> None:
    assert reachable([host("10.0.0.1")] * 3) == ["127.0.0.1"] * 3


def test_chooses_the_shared_network_over_local_bridges() -> None:
    hosts = [host("10.1.0.1", "10.0.0.1"), host("10.0.0.2"), host("10.2.0.3", "10.0.0.3")]
    assert reachable([*hosts, hosts[1]]) == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.2"]


def test_without_a_shared_network_uses_the_route() -> None:
    hosts = [host("10.1.0.1", default="10.1.0.1"), host("10.2.0.1", default="10.2.0.1")]
    assert reachable(hosts) == ["10.1.0.1", "10.2.0.1"]


def test_this_host_lists_no_loopback_addresses() -> None:
    assert all(not address.startswith("127.") for address, _ in this_host().interfaces)
    assert this_host() == this_host()


def test_interface_towards_a_host() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    with pytest.raises(ClusterError, match="Cannot reach 'no such host'"):
        interface_towards("no such host")
