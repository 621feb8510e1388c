"""Rendezvous of workers, and its failures. Workers are threads here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.commands import wait_for
from tfdist.cluster import Cluster, exchange_addresses, messages, networks, rendezvous
from tfdist.cluster.networks import free_ports
from tfdist.errors import ClusterError

LONG = 30.0
SHORT = 0.3  # Time-out in seconds where a worker is missing.
#: Time-out where one worker joins and another is missing: long enough for a busy machine.
IN_BETWEEN = 2.0


@pytest.fixture(autouse=True)
def _retry_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_RETRY_SECONDS", 0.02)


def with_master(size: int) -> list[Cluster]:
    master = f"127.0.0.1:{free_ports(1)[0]}"
    return [Cluster("Kubernetes", rank, size, master=master) for rank in range(size)]


def with_addresses(size: int) -> list[Cluster]:
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(size))
    return [Cluster("flags", rank, size, addresses=addresses) for rank in range(size)]


def exchange(clusters: Sequence[Cluster], seconds: float = LONG) -> list[Cluster | ClusterError]:
    """Returns what each worker gets or raises."""

    def worker(cluster: Cluster) -> Cluster | ClusterError:
        try:
            return exchange_addresses(cluster, seconds)
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(len(clusters)) as pool:
        return list(pool.map(worker, clusters))


def errors(outcomes: Sequence[Cluster | ClusterError]) -> list[str]:
    return [str(one) for one in outcomes if isinstance(one, ClusterError)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_workers_learn_all_addresses_from_a_master(size: int) -> None:
    outcomes = exchange(with_master(size)[::-1])  # rank 0 need not be the first
    assert not errors(outcomes)
    results = {one.addresses for one in outcomes if isinstance(one, Cluster)}
    assert len(results) == 1
    (addresses,) = results
    assert len(set(addresses)) == size
    assert {address.partition(":")[0] for address in addresses} == {"127.0.0.1"}
    assert sorted(one.local_rank for one in outcomes if isinstance(one, Cluster)) == list(
        range(size)
    )


def test_addresses_reach_the_leaves_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "FANOUT", 2)
    outcomes = exchange(with_master(9))  # three hops to rank 7
    assert not errors(outcomes)
    (addresses,) = {one.addresses for one in outcomes if isinstance(one, Cluster)}
    assert len(set(addresses)) == 9


def test_lost_parent_in_the_tree_raises() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ClusterError, match=r"Rank 20 did not receive .* addresses from rank 1 at"):
        asyncio.run(messages.fetch(address, 20))


@pytest.mark.parametrize("size", [1, 3])
def test_known_addresses_are_kept_and_ports_released(size: int) -> None:
    clusters = with_addresses(size)
    outcomes = exchange(clusters)
    assert not errors(outcomes)
    assert {one.addresses for one in outcomes if isinstance(one, Cluster)} == {
        clusters[0].addresses
    }
    for port in (int(address.partition(":")[2]) for address in clusters[0].addresses):
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_single_process_needs_no_rendezvous() -> None:
    (address,) = exchange_addresses(Cluster("one process", 0, 1)).addresses
    assert address.startswith("localhost:")


@pytest.mark.parametrize("make", [with_master, with_addresses])
def test_all_workers_report_missing_ranks(make: type) -> None:
    clusters = make(4)
    said = errors(exchange([clusters[0], clusters[2]], IN_BETWEEN))
    assert len(said) == 2
    assert all("Rank 1, 3 of 4 did not connect to rank 0" in text for text in said)


def test_missing_rank_0_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_MESSAGE_SECONDS", 0.1)
    (said,) = errors(exchange([with_master(2)[1]], SHORT))
    assert "Rank 1 timed out after waiting 0 s for rank 0 at 127.0.0.1:" in said


@pytest.mark.parametrize("make", [with_master, with_addresses])
@pytest.mark.parametrize("twice", [0, 1])
def test_duplicate_rank_raises_on_both_workers(make: type, twice: int) -> None:
    clusters = make(3)
    said = errors(exchange([clusters[0], clusters[twice], clusters[twice]][: 2 + twice]))
    assert len(said) == 2 + twice
    assert all(f"Two workers have rank {twice}" in text for text in said)


def test_different_address_lists_raise() -> None:
    first, second = with_addresses(2)
    elsewhere = f"127.0.0.1:{free_ports(1)[0]}"
    second = dataclasses.replace(second, addresses=(first.addresses[0], elsewhere))
    said = errors(exchange([first, second]))
    assert len(said) == 2
    assert all("Rank 1 and rank 0 have different lists of workers" in text for text in said)


@pytest.mark.parametrize("rank", [0, 1])
def test_port_in_use_raises(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_MESSAGE_SECONDS", 0.1)
    clusters = with_addresses(2)
    host, _, port = clusters[rank].address.partition(":")
    with socket.create_server((host, int(port))):
        # Rank 1 reports the problem to rank 0, so that neither waits for the time-out.
        said = errors(exchange(clusters, LONG if rank else SHORT))
    assert len(said) == 2
    assert clusters[rank].address in said[rank]
    assert "Address already in use" in said[rank]


def test_unrelated_connections_are_closed() -> None:
    clusters = with_master(2)
    host, _, port = clusters[0].master.partition(":")

    def send(sent: bytes) -> bool:
        try:
            one = socket.create_connection((host, int(port)), timeout=1)
        except OSError:
            return False  # nobody listens there yet
        with one, contextlib.suppress(OSError):  # the server may close the connection
            one.sendall(sent)
        return True

    def strangers() -> None:
        http = b"GET / HTTP/1.0\r\n\r\n"
        for message in (b"", http, b"[1]\n", b'{"rank": 1}\n', b"x" * 10**5):
            wait_for(lambda sent=message: send(sent), LONG)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(exchange, [clusters[0]])
        pool.submit(strangers).result()
        outcomes = [*exchange([clusters[1]]), *first.result()]
    assert not errors(outcomes)


def test_workers_of_another_job_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = with_master(2)
    monkeypatch.setattr(rendezvous, "_MESSAGE_SECONDS", 2.0)
    keys = iter([b"one job", b"another job"])
    monkeypatch.setattr(rendezvous.messages, "job_key", lambda: next(keys, b"another job"))
    said = errors(exchange(clusters, IN_BETWEEN))
    assert len(said) == 2
    assert any("Rank 1 of 2 did not connect to rank 0" in text for text in said)
    assert any("check that TFDIST_JOB_SECRET is the same" in text for text in said)


def test_unsigned_message_is_ignored() -> None:
    clusters = with_master(2)
    host, _, port = clusters[0].master.partition(":")
    message = b'{"rank":1,"size":2,"cluster":"","address":"h:1","problem":"","gpus":[]}\n'

    def forge() -> bytes:
        with socket.create_connection((host, int(port)), timeout=LONG) as one:
            one.settimeout(LONG)
            one.recv(100)  # the greeting
            one.sendall(message)
            return one.recv(100)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(exchange, [clusters[0]], IN_BETWEEN)
        wait_for(lambda: _listens(host, int(port)), LONG)
        assert pool.submit(forge).result() == b""
        assert "Rank 1 of 2 did not connect" in errors(first.result())[0]


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": -1},
        {"rank": "1"},
        {"rank": 10**30, "gpus": 3},
        {"problem": "x" * 10**4},
        {"gpus": ["x"] * 1000},
        {"stranger": 1},
    ],
    ids=str,
)
def test_messages_out_of_bounds_are_dropped(changes: dict[str, Any]) -> None:
    good = {"rank": 1, "size": 2, "cluster": "", "address": "h:1", "problem": "", "gpus": []}
    rendezvous._Worker.model_validate(good)
    with pytest.raises(ValidationError):
        rendezvous._Worker.model_validate(good | changes)


def test_escape_sequences_of_a_worker_are_not_printed() -> None:
    with pytest.raises(ClusterError) as caught:
        rendezvous._check("\x1b]0;title\x07 broken")
    assert str(caught.value) == "?]0;title? broken"


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        (["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
        (["localhost"], "127.0.0.1"),
        (["127.0.0.1", "10.0.0.2"], ""),
        (["node1", "node2"], ""),
        (["192.0.2.7", "192.0.2.8"], ""),
        (["10.1.2.3", "10.1.2.4"], "10.1.2.3"),
    ],
)
def test_listens_on_the_network_of_the_workers(
    hosts: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"eth0": [SimpleNamespace(address="10.1.2.3")], "lo": [SimpleNamespace(address="::1")]}
    monkeypatch.setattr(networks.psutil, "net_if_addrs", lambda: own)
    assert networks.listen_address(hosts) == address


def test_completed_rendezvous_is_not_repeated() -> None:
    (one,) = exchange(with_master(1))
    assert isinstance(one, Cluster)
    with socket.create_server(("", int(one.address.rpartition(":")[2]))):  # as TensorFlow's does
        assert exchange_addresses(one) is one


def test_parameter_servers_in_a_rendezvous_raise() -> None:
    with pytest.raises(ClusterError, match="use --strategy parameter_server"):
        exchange_addresses(Cluster("TF_CONFIG", 0, 1, addresses=("a:1",), ps=("b:1",)))


def test_rendezvous_inside_a_running_event_loop() -> None:
    async def cell() -> list[Cluster]:
        return [exchange_addresses(one, LONG) for one in with_master(1)]

    (found,) = asyncio.run(cell())
    assert len(found.addresses) == 1
