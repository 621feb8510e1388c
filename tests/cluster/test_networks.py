"""Networks between workers, and free ports."""

from __future__ import annotations

import os
import random
import socket
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tfdist.cluster import networks
from tfdist.cluster.networks import (
    Host,
    free_ports,
    interface_towards,
    reachable,
    reserved_ports,
    this_host,
)
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


def test_hosts_without_ipv4_use_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for number in (1, 2):
        addresses = {
            "lo": [_address("::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")],
            "eth0": [
                _address(f"fe80::{number}%eth0", "ffff:ffff:ffff:ffff::"),
                _address(f"fd00:77::{number}", "ffff:ffff:ffff:ffff::"),
            ],
        }
        monkeypatch.setattr(networks.psutil, "net_if_addrs", lambda known=addresses: known)
        up = {name: SimpleNamespace(isup=True) for name in addresses}
        monkeypatch.setattr(networks.psutil, "net_if_stats", lambda known=up: known)
        results.append(this_host())
    assert [one.interfaces for one in results] == [
        (("fd00:77::1", "fd00:77::/64"),),
        (("fd00:77::2", "fd00:77::/64"),),
    ]
    assert reachable(results) == ["fd00:77::1", "fd00:77::2"]


def _address(address: str, netmask: str) -> SimpleNamespace:
    return SimpleNamespace(address=address, netmask=netmask, family=socket.AF_INET6)


def test_containers_with_the_same_address_are_different_hosts() -> None:
    bridged = host("172.18.0.2")
    with pytest.raises(ClusterError, match="'b' has no address that the other hosts can reach"):
        reachable([bridged._replace(name="a"), Host((), "127.0.0.1", "b")])


@pytest.mark.parametrize(
    ("address", "is_alone", "fits"),
    [
        ("10.0.0.1", False, True),
        ("127.0.1.1", False, False),
        ("127.0.1.1", True, True),
        ("", False, False),
        ("", True, False),
    ],
)
def test_own_name_resolves_for_horovod(
    address: str, is_alone: bool, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str) -> str:
        if not address:
            raise socket.gaierror(-2, "Name or service not known")
        return address

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    with nullcontext() if fits else pytest.raises(ClusterError, match="to /etc/hosts"):
        networks.check_own_name(is_alone)


def test_loopback_that_is_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"lo": SimpleNamespace(isup=False)}
    monkeypatch.setattr(networks.psutil, "net_if_stats", lambda: states)
    networks.check_loopback("10.0.0.1")
    with pytest.raises(ClusterError, match="ip link set lo up"):
        networks.check_loopback("127.0.0.1")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"no_proxy": "a"}, {"no_proxy": "a"}),
        ({"http_proxy": "p"}, {"no_proxy": "fd00::1,b"}),
        ({"HTTPS_PROXY": "p", "NO_PROXY": "a, b"}, {"no_proxy": "a,b,fd00::1"}),
        (
            {"grpc_proxy": "p", "no_grpc_proxy": "a", "no_proxy": "c"},
            {"no_grpc_proxy": "a,fd00::1,b", "no_proxy": "c,fd00::1,b"},
        ),
    ],
)
def test_workers_are_connected_without_a_proxy(
    environ: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environ)
    before = dict(environ)
    networks.bypass_proxy(["[fd00::1]:1", "b:2", "b:3"])
    assert environ == before | expected


def test_reserved_ports_are_not_reused() -> None:
    with reserved_ports(50) as held:
        assert len(set(held)) == 50
        assert not set(held) & set(free_ports(50))
    with socket.create_server(("", held[0])):
        pass


def test_equal_seeds_choose_different_ports() -> None:
    random.seed(1)
    first = free_ports(5)
    random.seed(1)
    assert free_ports(5) != first
