"""Every other rank of the watchdog: reports to rank 0, and hears of the others."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Sequence

from tfdist.cluster.messages import LIMIT
from tfdist.watchdog.message import Update, updates
from tfdist.watchdog.report import Report
from tfdist.watchdog.status import HEARTBEAT_SECONDS, Status
from tfdist.watchdog.verdict import verdict

#: For rank 0 to answer at an address; one of a network that leads nowhere does not.
_ANSWER_SECONDS = 3.0
_ROUNDS = 5


class Reporter:
    """Connects to rank 0.

    Args:
        status: Of this process.
        hosts: Addresses of rank 0's host; the first that works is taken.
        port: Where rank 0 listens.
        token: What this worker is known by.
        on_verdict: Told of a verdict.
    """

    def __init__(
        self,
        status: Status,
        hosts: Sequence[str],
        port: int,
        token: str,
        on_verdict: Callable[[str], None],
    ) -> None:
        self._status, self._token, self._on_verdict = status, token, on_verdict
        self._hosts, self._port = hosts, port
        self._last = Update(token=token, reports=())
        self._heard = status.clock.now()
        self._connected = True
        self._writer: StreamWriter | None = None

    async def run(self) -> None:
        """Reports for ever; only warns where rank 0 cannot be reached."""
        reader = await self._connect()
        if reader is None:
            places = ", ".join(f"{host}:{self._port}" for host in self._hosts)
            print(
                f"warning: rank {self._status.rank} reaches rank 0 at none of {places}: open the "
                "ports between the hosts, or the watchdog cannot tell who is alive.",
                file=sys.stderr,
            )
            return
        listening = asyncio.create_task(self._listen(reader))
        self._status.clock.tick()  # a stop of this process may come before the first report
        while True:
            await self.send()
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._status.clock.tick()
            self._connected = not listening.done()
            self._judge_rank_0()

    def reports(self) -> list[Report]:
        """Returns what is known of each worker; of the others as rank 0 said last."""
        reports = list(self._last.reports)
        if reports:
            age = self._status.clock.now() - self._heard
            reports[0] = reports[0].aged(age).model_copy(update={"connected": self._connected})
            reports[self._status.rank] = self._status.report()
        return reports

    async def send(self) -> None:
        """Reports to rank 0."""
        if self._writer:
            self._writer.write(self._own_report())

    def _own_report(self) -> bytes:
        return Update(token=self._token, reports=(self._status.report(),)).encode()

    async def _connect(self) -> StreamReader | None:
        """Tries the addresses, several times, and returns the way to rank 0."""
        for _ in range(_ROUNDS):
            for host in self._hosts:
                with contextlib.suppress(OSError, StopAsyncIteration, TimeoutError):
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        reader, writer = await asyncio.open_connection(
                            host, self._port, limit=LIMIT
                        )
                        writer.write(self._own_report())
                        self._take(await anext(updates(reader, self._token)))
                        self._writer = writer
                        return reader
            await asyncio.sleep(HEARTBEAT_SECONDS)
        return None

    async def _listen(self, reader: StreamReader) -> None:
        async for update in updates(reader, self._token):
            self._take(update)
            if update.verdict:
                self._on_verdict(update.verdict)

    def _take(self, update: Update) -> None:
        self._last, self._heard = update, self._status.clock.now()

    def _judge_rank_0(self) -> None:
        """Judges rank 0, which can tell of the others but not of its own end."""
        if self._status.seconds and (reason := verdict(self.reports(), self._status.seconds)):
            self._on_verdict(reason)
