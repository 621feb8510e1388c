"""How the workers report to rank 0, and what they hear from it.

Every worker sends its report once per `heartbeat_seconds`, and rank 0 answers each with its own. So
each worker sends and receives a constant number of bytes per report, and rank 0 O(n) of n workers:
about `REPORTS_PER_SECOND` messages a second, with up to 4,000 workers. In jobs of more than
`SMALL_JOB` workers a change of state waits for the next report. Rank 0 keeps one report for each
worker, and closes a connection whose other side does not read. All messages are authenticated, and
of bounded size.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import resource
import socket
from asyncio import BaseTransport, Transport
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tfdist.cluster.messages import Session, to_text
from tfdist.watchdog.batching import SMALL_JOB
from tfdist.watchdog.status import (
    HEARTBEAT_SECONDS,
    Report,
    State,
    Status,
    heartbeat_seconds,
    missed_seconds,
)
from tfdist.watchdog.verdict import in_trouble, verdict, verdict_on_rank_0

_LOG = logging.getLogger("tfdist.watchdog")

#: Longest line, in bytes: a verdict of 40 lines, each shorter than 500 characters, escaped by JSON.
_LIMIT = 2**17
#: Longest line of a worker, in bytes.
_REPORT_LIMIT = 2**13
#: Bytes that are read at once.
_BUFFER_BYTES = 2**13
#: Bytes that wait for a worker to read them before its connection is closed.
_UNREAD_LIMIT = 2**16
#: Time for a new connection to authenticate itself, and for rank 0 to answer at an address.
_HELLO_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_ROUNDS = 5
_BACKLOG = 4096
#: Longest time for a verdict to leave before this process ends.
_FLUSH_SECONDS = 3.0


class _Lines(asyncio.BufferedProtocol):
    """A connection that receives lines of bounded length.

    Args:
        limit: Longest line, in bytes.
        received: Where the event loop puts what it reads, shared by the connections of the loop:
            otherwise it allocates 256 KiB for each message.
    """

    def __init__(self, limit: int, received: bytearray) -> None:
        self._limit, self._received, self._buffer = limit, received, b""
        self.transport: Transport | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        if isinstance(transport, Transport):
            self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        del sizehint
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        *lines, self._buffer = (self._buffer + self._received[:nbytes]).split(b"\n")
        for line in lines:
            if self.transport is None or self.transport.is_closing():
                return
            try:
                self.line_received(line)
            except ValueError as error:  # not of this job
                _LOG.debug("Closed a connection: %s", error)
                self.close()
        if len(self._buffer) > self._limit:
            self.close()

    def line_received(self, line: bytes) -> None:
        """Handles a line; raises a ValueError if it is not valid."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the connection, without sending what waits to be read."""
        if self.transport:
            self.transport.abort()


class Coordinator:
    """Rank 0: receives the reports of all workers, judges them, and sends the verdict.

    Args:
        status: Status of this process.
        size: Number of workers.
        listener: The socket where the others connect.
        key: What only the workers of this run know.
        on_verdict: Called with a verdict, after it was sent to the others.

    Attributes:
        received: Bytes received from workers.
        sent: Bytes sent to workers.
        buffer: Where the event loop puts what it reads from workers.
    """

    def __init__(
        self,
        status: Status,
        size: int,
        listener: socket.socket,
        key: bytes,
        on_verdict: Callable[[str], None],
    ) -> None:
        self._status, self._size, self._listener = status, size, listener
        self.key = key
        self._on_verdict = on_verdict
        self._reports = [Report(rank=rank) for rank in range(size)]
        self._heard = [status.clock.now()] * size
        self._connections: dict[int, _FromWorker] = {}
        self._trouble: list[int] = []
        self._answers: dict[bool, bytes] = {}
        self._verdict: str | None = None
        self._last_push = -1.0
        self.received = self.sent = 0
        self.buffer = bytearray(_BUFFER_BYTES)

    async def run(self) -> None:
        """Serves and judges forever."""
        _allow_connections(self._size)
        loop = asyncio.get_running_loop()
        async with await loop.create_server(
            lambda: _FromWorker(self), sock=self._listener, backlog=_BACKLOG
        ):
            while True:
                self._status.clock.tick()
                await self._judge()
                await asyncio.sleep(HEARTBEAT_SECONDS)

    def reports(self) -> list[Report]:
        """Returns what is known of each worker now, by rank."""
        now = self._status.clock.now()
        known = [
            report.aged(now - heard)
            for report, heard in zip(self._reports, self._heard, strict=True)
        ]
        known[self._status.rank] = self._status.report()
        return known

    def may_explain_error(self) -> bool:
        """Tells whether an error of this worker may come from another one's end."""
        return any(rank != 0 for rank in in_trouble(self.reports(), self._size))

    async def send(self, at_once: bool) -> None:
        """Sends this worker's report to all.

        Args:
            at_once: Whether it is urgent; otherwise it may wait for the workers' next reports.
        """
        now = self._status.clock.now()
        due = now - self._last_push >= heartbeat_seconds(self._size)
        if at_once or due or self._size <= SMALL_JOB:
            self._last_push = now
            self._push()

    def connected(self, rank: int, connection: _FromWorker) -> None:
        """Registers the connection of a worker, in the place of an older one."""
        older, self._connections[rank] = self._connections.get(rank), connection
        if older:
            older.close()

    def take(self, rank: int, report: Report) -> None:
        """Stores the report of a worker."""
        self._reports[rank], self._heard[rank] = report, self._status.clock.now()

    def disconnected(self, rank: int, connection: _FromWorker) -> None:
        """Notes that a connection is closed."""
        if self._connections.get(rank) is connection:
            del self._connections[rank]
            self._reports[rank] = self._reports[rank].closed()

    def answer(self, rank: int) -> bytes:
        """Returns the answer to a report of a worker: rank 0's report, trouble, and verdict.

        It is made anew at every judgement and change of state only.
        """
        trouble = any(other != rank for other in self._trouble[:2])
        if trouble not in self._answers:
            message = [self._status.report().to_message(), trouble, self._verdict]
            self._answers[trouble] = to_text(message)
        return self._answers[trouble]

    def _push(self) -> None:
        self._answers.clear()
        for rank, connection in list(self._connections.items()):
            connection.send(self.answer(rank))

    async def _judge(self) -> None:
        """Sends the verdict to all workers and obeys it, if there is one."""
        self._answers.clear()
        if not self._is_suspicious():
            self._trouble = []
            return
        reports = self.reports()
        self._trouble = in_trouble(reports, self._size)
        seconds = self._status.seconds
        self._verdict = verdict(reports, seconds) if seconds else None
        if self._verdict is None:
            return
        self._push()
        deadline = self._status.clock.now() + _FLUSH_SECONDS
        while self._status.clock.now() < deadline:  # the verdict leaves before this process ends
            await asyncio.sleep(0.1)
            if not any(c.unread for c in self._connections.values()):
                break
        self._on_verdict(self._verdict)

    def _is_suspicious(self) -> bool:
        """Tells, cheaply, whether reports are worth a closer look."""
        now, limit = self._status.clock.now(), missed_seconds(self._size)
        own = self._status.report()
        idle = own.idle if own.state is State.AT_WORK else math.inf
        for report, heard in zip(self._reports[1:], self._heard[1:], strict=True):
            state = report.state
            if state is State.UNHEARD:
                continue
            if state is State.FAILED or state is State.INTERRUPTED or not report.connected:
                return True
            age = now - heard
            if age >= limit:
                return True
            if state is State.AT_WORK:
                idle = min(idle, report.idle + age)
        if own.state in (State.FAILED, State.INTERRUPTED):
            return True
        return math.isfinite(idle) and idle >= self._status.seconds


class _FromWorker(_Lines):
    """The connection of one worker, at rank 0."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(_REPORT_LIMIT, coordinator.buffer)
        self._coordinator, self._rank = coordinator, -1
        self._session = Session(coordinator.key)

    @property
    def unread(self) -> int:
        """Bytes that wait to be sent."""
        return self.transport.get_write_buffer_size() if self.transport else 0

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        if self.transport:
            self.transport.write(self._session.greeting())
        asyncio.get_running_loop().call_later(_HELLO_SECONDS, self._close_stranger)

    def line_received(self, line: bytes) -> None:
        self._coordinator.received += len(line)
        message = self._session.verify(line)
        if self._rank < 0:
            self._rank, message = self._hello(message)
            self._coordinator.connected(self._rank, self)
        self._coordinator.take(self._rank, Report.from_message(self._rank, message))
        self.send(self._coordinator.answer(self._rank))

    def send(self, text: bytes) -> None:
        """Sends a message; closes the connection of a worker that does not read."""
        if self.transport is None or self.transport.is_closing():
            return
        if self.unread > _UNREAD_LIMIT:
            self.close()
            return
        line = self._session.sign_text(text)
        self._coordinator.sent += len(line)
        self.transport.write(line)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self._rank >= 0:
            self._coordinator.disconnected(self._rank, self)

    def _hello(self, message: Any) -> tuple[int, Any]:
        """Returns rank and report of the first message."""
        size = len(self._coordinator._reports)
        if not (isinstance(message, dict) and isinstance(message.get("rank"), int)):
            raise ValueError("no first message")
        if not 0 < message["rank"] < size:
            raise ValueError(f"rank {message['rank']} of {size}")
        return message["rank"], message.get("report")

    def _close_stranger(self) -> None:
        if self._rank < 0:
            self.close()


class Reporter:
    """Every other rank: reports to rank 0, and hears from it.

    Args:
        status: Status of this process.
        size: Number of workers.
        hosts: Addresses of rank 0's host; the first one that answers is used.
        port: Where rank 0 listens.
        key: What only the workers of this run know.
        on_verdict: Called with a verdict.
    """

    def __init__(
        self,
        status: Status,
        size: int,
        hosts: Sequence[str],
        port: int,
        key: bytes,
        on_verdict: Callable[[str], None],
    ) -> None:
        self._status, self._size, self.key = status, size, key
        self._on_verdict = on_verdict
        self._hosts, self._port = hosts, port
        self._rank_0 = Report(rank=0)
        self._heard = status.clock.now()
        self._last_sent = -1.0
        self._trouble = False
        self._connection: _ToRank0 | None = None
        self.answered = asyncio.Event()

    async def run(self) -> None:
        """Reports forever; only warns if rank 0 cannot be reached."""
        self._connection = await self._connect()
        if self._connection is None:
            places = ", ".join(f"{host}:{self._port}" for host in self._hosts)
            _LOG.warning(
                "Rank %d cannot reach rank 0 at %s: open the ports between the hosts, or the "
                "watchdog cannot tell which workers are alive.",
                self._status.rank,
                places,
            )
            return
        interval = heartbeat_seconds(self._size)
        self._status.clock.tick()  # this process may be stopped before the first report
        if self._size > SMALL_JOB:  # so that not all workers report at the same moment
            await asyncio.sleep(interval * random.random())
            self._status.clock.tick()
        while True:
            await self.send(at_once=True)
            await asyncio.sleep(interval)
            self._status.clock.tick()
            self._judge()

    def reports(self) -> list[Report]:
        """Returns what is known of rank 0 and of this worker; empty before rank 0 has answered."""
        if self._rank_0.state is State.UNHEARD:
            return []
        return [self._current_rank_0(), self._status.report()]

    def may_explain_error(self) -> bool:
        """Tells whether an error of this worker may come from another one's end."""
        own = self._status.report()
        return self._trouble or bool(in_trouble([self._current_rank_0(), own], self._size))

    async def send(self, at_once: bool) -> None:
        """Reports to rank 0.

        Args:
            at_once: Whether it is urgent; otherwise it may wait for the next report.
        """
        now = self._status.clock.now()
        due = now - self._last_sent >= heartbeat_seconds(self._size)
        if self._connection and (at_once or due or self._size <= SMALL_JOB):
            self._last_sent = now
            self._connection.send(self._status.report().to_message())

    def take(self, message: Any) -> None:
        """Stores rank 0's answer, and obeys its verdict.

        Raises:
            ValueError: The message has another form.
        """
        if not (isinstance(message, list) and len(message) == 3):
            raise ValueError("no answer of rank 0")
        self._rank_0, self._heard = Report.from_message(0, message[0]), self._status.clock.now()
        self._trouble = bool(message[1])
        self.answered.set()
        if message[2]:
            self._on_verdict(str(message[2]))

    def first_message(self) -> dict[str, Any]:
        """Returns the message that begins a connection."""
        report = self._status.report()
        return {"rank": report.rank, "report": report.to_message()}

    def disconnected(self) -> None:
        """Notes that the connection to rank 0 is closed."""
        self._rank_0 = self._rank_0.closed()

    async def _connect(self) -> _ToRank0 | None:
        """Tries all addresses, several times; returns the connection after rank 0's answer."""
        loop = asyncio.get_running_loop()
        for _ in range(_ROUNDS):
            for host in self._hosts:
                connection = _ToRank0(self)
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        await loop.create_connection(partial(_itself, connection), host, self._port)
                        await self.answered.wait()
                        return connection
                connection.close()
            await asyncio.sleep(HEARTBEAT_SECONDS * (0.5 + random.random()))
        return None

    def _current_rank_0(self) -> Report:
        return self._rank_0.aged(self._status.clock.now() - self._heard)

    def _judge(self) -> None:
        """Judges rank 0, which cannot report its own end."""
        seconds, own = self._status.seconds, self._status.report()
        if not seconds:
            return
        if reason := verdict_on_rank_0(self._current_rank_0(), own, seconds, self._size):
            self._on_verdict(reason)


class _ToRank0(_Lines):
    """The connection to rank 0, at another worker."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(_LIMIT, bytearray(_BUFFER_BYTES))
        self._reporter = reporter
        self._session: Session | None = None
        self._answered = False

    def line_received(self, line: bytes) -> None:
        if self._session:
            self._reporter.take(self._session.verify(line))
            self._answered = True
            return
        self._session = Session.answering(self._reporter.key, line)
        if self._session is None:
            raise ValueError("not a worker of tfdist")
        self.send(self._reporter.first_message())

    def send(self, message: Any) -> None:
        """Sends a message, unless rank 0 does not read."""
        if self.transport is None or self._session is None or self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size() < _UNREAD_LIMIT:
            self.transport.write(self._session.sign(message))

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self._answered:
            self._reporter.disconnected()


def _itself(connection: _ToRank0) -> _ToRank0:
    return connection


def _allow_connections(size: int) -> None:
    """Raises this process's limit of open files for a connection of each worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = size + 1024
    if soft != resource.RLIM_INFINITY and soft < required:
        most = required if hard == resource.RLIM_INFINITY else min(required, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
