"""The watchdog on real sockets: a short simulation of 64 workers, and invalid messages."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from tests.studies.watchdog import simulate
from tfdist.cluster.messages import Session
from tfdist.cluster.watchdog import protocol
from tfdist.cluster.watchdog.protocol import _UNREAD_LIMIT, Coordinator, Reporter
from tfdist.cluster.watchdog.status import State, Status, heartbeat_seconds

KEY = b"the key of this job"
SECONDS = 30.0


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


def test_many_failures_are_one_verdict() -> None:
    outcome = asyncio.run(simulate(64, processes=1, seconds=3.0, faults=("100 killed",)))
    assert outcome.detection_seconds["100 killed"] is not None
    verdict = outcome.verdicts["100 killed"].splitlines()
    assert "31 more died, on " in verdict[0]
    assert len(verdict) <= 40
    assert outcome.num_informed["100 killed"] == 31
    # Each report and its answer have some hundred bytes; a broadcast to all would be 64 times that.
    assert 0 < outcome.sent < 64 * 500
    assert 0 < outcome.received < 64 * 500


def test_worker_ticks_its_clock_in_every_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    status, waited = Status(1, size=4096), [0.0]
    reporter = Reporter(status, 4096, [], 0, KEY, print)

    async def connected() -> Any:
        return SimpleNamespace(send=lambda report: None)

    async def sleep(seconds: float) -> None:
        waited[-1] += seconds
        if len(waited) > 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(reporter, "_connect", connected)
    monkeypatch.setattr(protocol, "_random", SimpleNamespace(random=lambda: 0.9))
    before = random.getstate()
    monkeypatch.setattr(status.clock, "tick", lambda: waited.append(0.0))
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(reporter.run())
    assert max(waited) <= heartbeat_seconds(4096)
    assert random.getstate() == before


class Rank0:
    """A coordinator of four workers, and its verdicts."""

    def __init__(self) -> None:
        self.verdicts: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        # Accepted sockets inherit it: the system's own buffers would take megabytes.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.port = self.listener.getsockname()[1]
        self.status = Status(0, size=4)
        self.coordinator = Coordinator(self.status, 4, self.listener, KEY, self.verdicts.append)

    async def __aenter__(self) -> Rank0:
        self.task = asyncio.create_task(self.coordinator.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def connect(self, key: bytes = KEY) -> tuple[Any, Any, Session]:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=one)
        session = Session.answering(key, await reader.readline())
        assert session
        return reader, writer, session

    async def is_refused(self, sent: bytes) -> bool:
        """Returns whether bytes end the connection and leave no report behind."""
        reader, writer, _ = await self.connect()
        writer.write(sent)
        try:
            answer = await reader.read()
        except ConnectionError:
            answer = b""
        writer.close()
        heard = [r.rank for r in self.coordinator.reports() if r.state is not State.UNKNOWN]
        return answer == b"" and heard == [0]


def first(session: Session, rank: Any, report: Any = None) -> bytes:
    return session.sign({"rank": rank, "report": report or Status(1).report().to_message()})


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"x" * 10**5,
        b'{"rank": 1, "report": []}\n',
        b"\xff\x00\n",
        (json.dumps({"rank": 1}) + "\n").encode() * 3,
    ],
    ids=["http", "long", "unsigned", "bytes", "several"],
)
def test_unrelated_connections_are_refused(sent: bytes) -> None:
    async def attempt() -> bool:
        async with Rank0() as rank_0:
            return await rank_0.is_refused(sent)

    assert run(attempt())


@pytest.mark.parametrize(
    ("key", "rank"),
    [(b"", 1), (b"another job", 1), *((KEY, rank) for rank in (0, 4, -1, 10**9, "1", None))],
)
def test_wrong_keys_and_ranks_are_refused(key: bytes, rank: Any) -> None:
    async def attempt() -> bytes:
        async with Rank0() as rank_0:
            reader, writer, session = await rank_0.connect(key)
            writer.write(first(session, rank))
            try:
                return await reader.read()
            except ConnectionError:
                return b""

    assert run(attempt()) == b""


def test_recorded_connection_cannot_be_replayed() -> None:
    async def attempt() -> tuple[bytes, bytes]:
        async with Rank0() as rank_0:
            reader, writer, session = await rank_0.connect()
            recorded = first(session, 1)
            writer.write(recorded)
            answer = await reader.readline()
            again, second, _ = await rank_0.connect()
            second.write(recorded)
            try:
                return answer, await again.read()
            except ConnectionError:
                return answer, b""

    answer, repeated = run(attempt())
    assert answer
    assert repeated == b""


def test_escape_sequences_of_a_worker_are_not_printed() -> None:
    async def attempt() -> str:
        async with Rank0() as rank_0:
            status = Status(1, host="node\x1b[2J")
            status.leave(State.FAILED, "\x1b]0;title\x07")
            reader, writer, session = await rank_0.connect()
            writer.write(first(session, 1, status.report().to_message()))
            await reader.readline()
            return "".join(f"{r.host}{r.error}" for r in rank_0.coordinator.reports())

    assert "\x1b" not in run(attempt())


def test_worker_that_does_not_read_is_dropped() -> None:
    """It keeps reporting, and its answers must not fill the memory of rank 0."""

    async def attempt() -> int:
        async with Rank0() as rank_0:
            _, writer, session = await rank_0.connect()
            writer.transport.pause_reading()
            report = Status(1).report().to_message()
            writer.write(first(session, 1))
            most = 0
            while not writer.is_closing():
                for _ in range(100):
                    writer.write(session.sign(report))
                await asyncio.sleep(0)
                connections = rank_0.coordinator._connections.values()
                most = max([most, *(connection.unread for connection in connections)])
                try:
                    await writer.drain()
                except ConnectionError:
                    break
            return most

    assert run(attempt()) < 4 * _UNREAD_LIMIT


def test_worker_receives_the_verdict_of_rank_0() -> None:
    async def attempt() -> list[str]:
        async with Rank0() as rank_0:
            heard: list[str] = []
            status = Status(1, size=4)
            hosts = ["203.0.113.1.invalid", "127.0.0.1"]
            reporter = Reporter(status, 4, hosts, rank_0.port, KEY, heard.append)
            task = asyncio.create_task(reporter.run())
            await reporter.answered.wait()
            rank_0.status.enter("fit", 2.0)
            status.enter("fit", 2.0)
            rank_0.status.leave(State.FAILED, "ValueError: x")
            while not heard or not rank_0.verdicts:
                await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return heard

    assert "failed: ValueError: x" in run(attempt())[0]
