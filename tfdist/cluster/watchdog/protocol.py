"""The messages between rank 0 and the other workers.

Every worker sends its report once per `heartbeat_seconds`, and rank 0 replies with its own. Each
worker sends and receives a constant number of bytes per report. Rank 0 handles O(n) bytes for n
workers: about `REPORTS_PER_SECOND` messages per second, with up to 4,000 workers. In jobs of more
than `SMALL_JOB` workers, a change of state is sent with the next regular report. Rank 0 stores one
report per worker, and closes connections of workers that do not read. All messages are
authenticated and of bounded size.
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
from tfdist.cluster.watchdog.status import (
    HEARTBEAT_SECONDS,
    Report,
    State,
    Status,
    heartbeat_seconds,
    missed_seconds,
)
from tfdist.cluster.watchdog.verdict import in_trouble, verdict, verdict_on_rank_0

_LOG = logging.getLogger("tfdist.cluster.watchdog")

#: Not Python's global generator, whose draws the user's seed determines.
_random = random.SystemRandom()

#: Maximum line length in bytes: a verdict of 40 lines of up to 500 characters, escaped by JSON.
_LIMIT = 2**17
#: Maximum length of a worker's line, in bytes.
_REPORT_LIMIT = 2**13
#: Size of the read buffer, in bytes.
_BUFFER_BYTES = 2**13
#: Number of unread bytes after which the connection to a worker is closed.
_UNREAD_LIMIT = 2**16
#: Time limits for a new connection to authenticate, and for rank 0 to reply at an address.
_HELLO_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_ROUNDS = 5
_BACKLOG = 4096
#: Maximum time to send a verdict before this process exits.
_FLUSH_SECONDS = 3.0
#: Up to this number of workers, every message is handled immediately.
SMALL_JOB = 64


class _Lines(asyncio.BufferedProtocol):
    """A connection that receives lines of bounded length.

    Args:
        limit: Maximum line length, in bytes.
        received: The read buffer, shared by all connections of the event loop, which otherwise
            allocates 256 KiB for each message.
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
            except ValueError as error:  # not a valid message of this job
                _LOG.debug("Closed a connection: %s", error)
                self.close()
        if len(self._buffer) > self._limit:
            self.close()

    def line_received(self, line: bytes) -> None:
        """Handles a line; raises a ValueError if it is not valid."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the connection and discards unsent data."""
        if self.transport:
            self.transport.abort()


class Coordinator:
    """Rank 0: receives the reports of all workers, evaluates them, and sends the verdict.

    Attributes:
        received: Bytes received from workers.
        sent: Bytes sent to workers.
        buffer: The read buffer of all connections.
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
        self._last_report_times = [status.clock.now()] * size
        self._connections: dict[int, _FromWorker] = {}
        self._trouble: list[int] = []
        self._answers: dict[bool, bytes] = {}
        self._verdict: str | None = None
        self._last_push = -1.0
        self.received = self.sent = 0
        self.buffer = bytearray(_BUFFER_BYTES)

    async def run(self) -> None:
        """Serves the workers and evaluates their reports, forever."""
        # Each worker's connection is an open file.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        required = self._size + 1024
        if soft != resource.RLIM_INFINITY and soft < required:
            limit = required if hard == resource.RLIM_INFINITY else min(required, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _FromWorker(self), sock=self._listener, backlog=_BACKLOG
        )
        try:
            while True:
                self._status.clock.tick()
                await self._judge()
                await asyncio.sleep(HEARTBEAT_SECONDS)
        finally:
            server.close()  # `async with` would wait for the workers to go, from Python 3.12 on

    def reports(self) -> list[Report]:
        """Returns the current state of each worker, by rank."""
        now = self._status.clock.now()
        received = [
            report.aged(now - last_time)
            for report, last_time in zip(self._reports, self._last_report_times, strict=True)
        ]
        received[self._status.rank] = self._status.report()
        return received

    def may_explain_error(self) -> bool:
        """Returns whether the failure of another worker may have caused an error of this one."""
        return any(rank != 0 for rank in in_trouble(self.reports(), self._size))

    async def send(self, at_once: bool) -> None:
        """Sends this worker's report to all.

        Args:
            at_once: Whether to send it immediately; otherwise it may wait for the next reports.
        """
        now = self._status.clock.now()
        due = now - self._last_push >= heartbeat_seconds(self._size)
        if at_once or due or self._size <= SMALL_JOB:
            self._last_push = now
            self._push()

    def connected(self, rank: int, connection: _FromWorker) -> None:
        """Registers the connection of a worker, and closes an older one."""
        older, self._connections[rank] = self._connections.get(rank), connection
        if older:
            older.close()

    def take(self, rank: int, report: Report) -> None:
        """Stores the report of a worker."""
        self._reports[rank], self._last_report_times[rank] = report, self._status.clock.now()

    def disconnected(self, rank: int, connection: _FromWorker) -> None:
        """Records that a worker's connection was closed."""
        if self._connections.get(rank) is connection:
            del self._connections[rank]
            self._reports[rank] = self._reports[rank].closed()

    def answer(self, rank: int) -> bytes:
        """Returns the reply to a worker's report: rank 0's report, failures, and the verdict.

        Replies are cached until the next evaluation or change of state.
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
        """Evaluates the reports. If there is a verdict, sends it to all workers and acts on it."""
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
        while self._status.clock.now() < deadline:  # send the verdict before this process exits
            await asyncio.sleep(0.1)
            if not any(c.unread for c in self._connections.values()):
                break
        self._on_verdict(self._verdict)

    def _is_suspicious(self) -> bool:
        """Returns whether any report may lead to a verdict; cheaper than evaluating them all."""
        now, limit = self._status.clock.now(), missed_seconds(self._size)
        local_report = self._status.report()
        idle = local_report.idle if local_report.state is State.RUNNING else math.inf
        for report, last_time in zip(self._reports[1:], self._last_report_times[1:], strict=True):
            state = report.state
            if state is State.UNKNOWN:
                continue
            if state is State.FAILED or state is State.INTERRUPTED or not report.connected:
                return True
            age = now - last_time
            if age >= limit:
                return True
            if state is State.RUNNING:
                idle = min(idle, report.idle + age)
        if local_report.state in (State.FAILED, State.INTERRUPTED):
            return True
        return math.isfinite(idle) and idle >= self._status.seconds


class _FromWorker(_Lines):
    """Rank 0's connection to one worker."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(_REPORT_LIMIT, coordinator.buffer)
        self._coordinator, self._rank = coordinator, -1
        self._session = Session(coordinator.key)

    @property
    def unread(self) -> int:
        """Number of unsent bytes."""
        return self.transport.get_write_buffer_size() if self.transport else 0

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        if self.transport:
            self.transport.write(self._session.greeting())
        asyncio.get_running_loop().call_later(_HELLO_SECONDS, self._close_unauthenticated)

    def line_received(self, line: bytes) -> None:
        self._coordinator.received += len(line)
        message = self._session.verify(line)
        if self._rank < 0:
            size = len(self._coordinator._reports)
            if not (isinstance(message, dict) and isinstance(message.get("rank"), int)):
                raise ValueError("no first message")
            if not 0 < message["rank"] < size:
                raise ValueError(f"rank {message['rank']} of {size}")
            self._rank, message = message["rank"], message.get("report")
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

    def _close_unauthenticated(self) -> None:
        if self._rank < 0:
            self.close()


class Reporter:
    """All other ranks: sends reports to rank 0, and receives its replies.

    Args:
        status: Status of this process.
        size: Number of workers.
        hosts: Addresses of rank 0's host. The first one that responds is used.
        port: Port at which rank 0 listens.
        key: The secret key of this run.
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
        self._last_report_time = status.clock.now()
        self._last_sent = -1.0
        self._trouble = False
        self._connection: _ToRank0 | None = None
        self.answered = asyncio.Event()

    async def run(self) -> None:
        """Sends reports forever. If rank 0 cannot be reached, prints a warning and returns."""
        self._connection = await self._connect()
        if self._connection is None:
            places = ", ".join(f"{host}:{self._port}" for host in self._hosts)
            _LOG.warning(
                "Rank %d cannot connect to rank 0 at %s, so the watchdog cannot detect failed "
                "workers. Open the ports between the hosts.",
                self._status.rank,
                places,
            )
            return
        interval = heartbeat_seconds(self._size)
        self._status.clock.tick()  # the process may be suspended before the first report
        if self._size > SMALL_JOB:  # spread the reports of the workers over the interval
            await asyncio.sleep(interval * _random.random())
            self._status.clock.tick()
        while True:
            await self.send(at_once=True)
            await asyncio.sleep(interval)
            self._status.clock.tick()
            self._judge()

    def reports(self) -> list[Report]:
        """Returns the reports of rank 0 and of this worker; empty before rank 0's first reply."""
        if self._rank_0.state is State.UNKNOWN:
            return []
        return [self._current_rank_0(), self._status.report()]

    def may_explain_error(self) -> bool:
        """Returns whether the failure of another worker may have caused an error of this one."""
        report = self._status.report()
        return self._trouble or bool(in_trouble([self._current_rank_0(), report], self._size))

    async def send(self, at_once: bool) -> None:
        """Reports to rank 0.

        Args:
            at_once: Whether to send it immediately; otherwise it may wait for the next report.
        """
        now = self._status.clock.now()
        due = now - self._last_sent >= heartbeat_seconds(self._size)
        if self._connection and (at_once or due or self._size <= SMALL_JOB):
            self._last_sent = now
            self._connection.send(self._status.report().to_message())

    def take(self, message: Any) -> None:
        """Stores rank 0's reply, and acts on its verdict.

        Raises:
            ValueError: The message is invalid.
        """
        if not (isinstance(message, list) and len(message) == 3):
            raise ValueError("not a reply of rank 0")
        self._rank_0, self._last_report_time = (
            Report.from_message(0, message[0]),
            self._status.clock.now(),
        )
        self._trouble = bool(message[1])
        self.answered.set()
        if message[2]:
            self._on_verdict(str(message[2]))

    def first_message(self) -> dict[str, Any]:
        """Returns the message that begins a connection."""
        report = self._status.report()
        return {"rank": report.rank, "report": report.to_message()}

    def disconnected(self) -> None:
        """Records that the connection to rank 0 was closed."""
        self._rank_0 = self._rank_0.closed()

    async def _connect(self) -> _ToRank0 | None:
        """Tries all addresses several times. Returns the connection after rank 0's first reply."""
        loop = asyncio.get_running_loop()
        for _ in range(_ROUNDS):
            for host in self._hosts:
                connection = _ToRank0(self)
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        await loop.create_connection(
                            partial(_identity, connection), host, self._port
                        )
                        await self.answered.wait()
                        return connection
                connection.close()
            await asyncio.sleep(HEARTBEAT_SECONDS * (0.5 + _random.random()))
        return None

    def _current_rank_0(self) -> Report:
        return self._rank_0.aged(self._status.clock.now() - self._last_report_time)

    def _judge(self) -> None:
        """Checks whether rank 0 itself has failed, which rank 0 cannot report."""
        seconds, report = self._status.seconds, self._status.report()
        if not seconds:
            return
        if reason := verdict_on_rank_0(self._current_rank_0(), report, seconds, self._size):
            self._on_verdict(reason)


class _ToRank0(_Lines):
    """Another worker's connection to rank 0."""

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
        """Sends a message, unless too much data is unsent."""
        if self.transport is None or self._session is None or self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size() < _UNREAD_LIMIT:
            self.transport.write(self._session.sign(message))

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self._answered:
            self._reporter.disconnected()


def _identity(connection: _ToRank0) -> _ToRank0:
    return connection
