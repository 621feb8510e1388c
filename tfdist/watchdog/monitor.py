"""Rank 0 of the watchdog: hears every worker, judges, and tells all."""

from __future__ import annotations

import asyncio
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable

from tfdist.cluster.messages import LIMIT
from tfdist.watchdog.message import Update, updates
from tfdist.watchdog.report import Report
from tfdist.watchdog.status import HEARTBEAT_SECONDS, Status
from tfdist.watchdog.verdict import verdict


class Monitor:
    """Listens at a socket.

    Args:
        status: Of this process.
        size: Number of workers.
        listener: Where the others connect.
        token: What they are known by.
        on_verdict: Told of a verdict, after the others were.
    """

    def __init__(
        self,
        status: Status,
        size: int,
        listener: socket.socket,
        token: str,
        on_verdict: Callable[[str], None],
    ) -> None:
        self._status, self._listener, self._token = status, listener, token
        self._on_verdict = on_verdict
        self._reports = {rank: Report(rank=rank) for rank in range(size)}
        self._heard = dict.fromkeys(self._reports, status.clock.now())
        self._reporters: set[StreamWriter] = set()

    async def run(self) -> None:
        """Sends for ever."""
        await asyncio.start_server(self._hear, sock=self._listener, limit=LIMIT)
        while True:
            self._status.clock.tick()
            await self.send()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def reports(self) -> list[Report]:
        """Returns what is known of each worker now, by rank."""
        now = self._status.clock.now()
        known = [report.aged(now - self._heard[rank]) for rank, report in self._reports.items()]
        known[self._status.rank] = self._status.report()
        return known

    async def send(self) -> None:
        """Tells all workers of all, and obeys the verdict."""
        reports = self.reports()
        reason = verdict(reports, self._status.seconds) if self._status.seconds else None
        update = Update(token=self._token, reports=tuple(reports), verdict=reason).encode()
        for reporter in self._reporters:
            reporter.write(update)  # not waited for: one that is stopped never takes it
        if reason:
            await asyncio.sleep(0.1)  # for the update to leave before this process does
            self._on_verdict(reason)

    async def _hear(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Hears one worker until it goes."""
        rank = None
        try:
            async for update in updates(reader, self._token):
                report = update.reports[0]
                self._reports[report.rank] = report
                self._heard[report.rank] = self._status.clock.now()
                if rank is None:
                    rank = report.rank
                    self._reporters.add(writer)
                    await self.send()  # at once: it wants to know whether it came to the right one
        finally:
            self._reporters.discard(writer)
            writer.close()
            if rank is not None:
                self._reports[rank] = self._reports[rank].model_copy(update={"connected": False})
