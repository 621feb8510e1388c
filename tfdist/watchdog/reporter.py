"""Every other rank of the watchdog: tells rank 0 of itself, and hears of the others."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Sequence

from tfdist.watchdog.message import LIMIT, Line, aged, lines
from tfdist.watchdog.status import BEAT_SECONDS, Pulse
from tfdist.watchdog.verdict import Row, verdict

#: For rank 0 to answer at an address; one of a network that leads nowhere does not.
_ANSWER_SECONDS = 3.0
_ROUNDS = 5


class Guest:
    """Comes to rank 0.

    Args:
        pulse: Of this process.
        hosts: Addresses of rank 0's host; the first that works is taken.
        port: Where rank 0 listens.
        token: What it is known by.
        obey: Told of a verdict.
    """

    def __init__(
        self,
        pulse: Pulse,
        hosts: Sequence[str],
        port: int,
        token: str,
        obey: Callable[[str], None],
    ) -> None:
        self._pulse, self._token, self._obey = pulse, token, obey
        self._hosts, self._port = hosts, port
        self._line = Line(token=token, rows=())
        self._heard = pulse.clock.now()
        self._connected = True
        self._writer: StreamWriter | None = None

    async def run(self) -> None:
        """Beats for ever; only warns where rank 0 cannot be reached."""
        reader = await self._reach()
        if reader is None:
            places = ", ".join(f"{host}:{self._port}" for host in self._hosts)
            print(
                f"warning: rank {self._pulse.rank} reaches rank 0 at none of {places}: open the "
                "ports between the hosts, or the watchdog cannot tell who is alive.",
                file=sys.stderr,
            )
            return
        listening = asyncio.create_task(self._listen(reader))
        while True:
            await self.tell()
            await asyncio.sleep(BEAT_SECONDS)
            self._pulse.clock.tick()
            self._connected = not listening.done()
            self._watch_rank_0()

    def rows(self) -> list[Row]:
        """Returns what is known of each worker; of the others as rank 0 said last."""
        rows = list(self._line.rows)
        if rows:
            age = self._pulse.clock.now() - self._heard
            rows[0] = aged(rows[0], age).model_copy(update={"connected": self._connected})
            rows[self._pulse.rank] = self._pulse.row()
        return rows

    async def tell(self) -> None:
        """Tells rank 0 of this worker."""
        if self._writer:
            self._writer.write(self._own())

    def _own(self) -> bytes:
        return Line(token=self._token, rows=(self._pulse.row(),)).encode()

    async def _reach(self) -> StreamReader | None:
        """Tries the addresses, several times, and returns the way to rank 0."""
        for _ in range(_ROUNDS):
            for host in self._hosts:
                with contextlib.suppress(OSError, StopAsyncIteration, TimeoutError):
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        reader, writer = await asyncio.open_connection(
                            host, self._port, limit=LIMIT
                        )
                        writer.write(self._own())
                        self._take(await anext(lines(reader, self._token)))
                        self._writer = writer
                        return reader
            await asyncio.sleep(BEAT_SECONDS)
        return None

    async def _listen(self, reader: StreamReader) -> None:
        async for line in lines(reader, self._token):
            self._take(line)
            if line.verdict:
                self._obey(line.verdict)

    def _take(self, line: Line) -> None:
        self._line, self._heard = line, self._pulse.clock.now()

    def _watch_rank_0(self) -> None:
        """Judges rank 0, which can tell of the others but not of its own end."""
        if self._pulse.seconds and (reason := verdict(self.rows(), self._pulse.seconds)):
            self._obey(reason)
