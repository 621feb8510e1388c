"""Rendezvous of thousands of workers: the cost on rank 0 is linear in their number."""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tfdist.cluster import Cluster, rendezvous
from tfdist.cluster.networks import free_ports

SECONDS = 240.0
_PROCESSES = 4


def clusters(size: int, ranks: range, master: str, addresses: tuple[str, ...]) -> list[Cluster]:
    return [
        Cluster("test", rank, size, addresses=addresses, master="" if addresses else master)
        for rank in ranks
    ]


def run_workers(members: list[Cluster], parent: Connection) -> None:
    """Runs the rendezvous of many workers, and sends how many addresses each one got."""
    raise_limit_of_files()
    parent.send(asyncio.run(meet_all(members)))


async def meet_all(members: list[Cluster]) -> tuple[int, set[tuple[str, ...]]]:
    meetings = await asyncio.gather(*(rendezvous.meeting(one, SECONDS) for one in members))
    return len(meetings), {meeting.addresses for meeting in meetings}


def raise_limit_of_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def sent_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the lengths of the lines that this process sends as rank 0."""
    lengths: list[int] = []
    send_last = rendezvous._send_last

    async def counted(reader: Any, writer: Any, line: bytes) -> None:
        lengths.append(len(line))
        await send_last(reader, writer, line)

    monkeypatch.setattr(rendezvous, "_send_last", counted)
    return lengths


@pytest.mark.long
@pytest.mark.parametrize("known", [True, False], ids=["addresses", "master"])
def test_rendezvous_of_1024_workers(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_limit_of_files()
    size = 1024
    ports = free_ports(size if known else 1)
    addresses = tuple(f"127.0.0.1:{port}" for port in ports) if known else ()
    master = f"127.0.0.1:{ports[0]}"
    lengths = sent_by_rank_0(monkeypatch)
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for number in range(_PROCESSES):
        ranks = range(1 + number, size, _PROCESSES)
        ours, theirs = context.Pipe()
        members = clusters(size, ranks, master, addresses)
        children.append(context.Process(target=run_workers, args=(members, theirs), daemon=True))
        pipes.append(ours)
    for child in children:
        child.start()
    try:
        (rank_0,) = clusters(size, range(1), master, addresses)
        result = rendezvous.meet(rank_0, SECONDS).addresses
        answers = [pipe.recv() if pipe.poll(SECONDS) else (0, set()) for pipe in pipes]
    finally:
        for child in children:
            child.kill()
            child.join()
    assert sum(number for number, _ in answers) == size - 1
    assert {result}.union(*(lists for _, lists in answers)) == {result}
    assert len(set(result)) == size
    long_answers = [length for length in lengths if length > 500]
    assert len(lengths) == size - 1
    assert len(long_answers) == (0 if known else rendezvous.relay.FANOUT)
