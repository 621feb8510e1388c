"""Rank 0 of the watchdog: hears every worker, judges, and tells all."""

from __future__ import annotations

import asyncio
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable

from tfdist.watchdog.message import LIMIT, Line, aged, lines
from tfdist.watchdog.status import BEAT_SECONDS, Pulse
from tfdist.watchdog.verdict import Row, verdict


class Hub:
    """Listens at a socket.

    Args:
        pulse: Of this process.
        size: Number of workers.
        listener: Where the others come.
        token: What they begin with.
        obey: Told of a verdict, after the others were.
    """

    def __init__(
        self,
        pulse: Pulse,
        size: int,
        listener: socket.socket,
        token: str,
        obey: Callable[[str], None],
    ) -> None:
        self._pulse, self._listener, self._token, self._obey = pulse, listener, token, obey
        self._rows = {rank: Row(rank=rank) for rank in range(size)}
        self._heard = dict.fromkeys(self._rows, pulse.clock.now())
        self._guests: set[StreamWriter] = set()

    async def run(self) -> None:
        """Beats for ever."""
        await asyncio.start_server(self._welcome, sock=self._listener, limit=LIMIT)
        while True:
            self._pulse.clock.tick()
            await self.tell()
            await asyncio.sleep(BEAT_SECONDS)

    def rows(self) -> list[Row]:
        """Returns what is known of each worker now, by rank."""
        now = self._pulse.clock.now()
        known = [aged(row, now - self._heard[rank]) for rank, row in self._rows.items()]
        known[self._pulse.rank] = self._pulse.row()
        return known

    async def tell(self) -> None:
        """Tells all workers of all, and obeys the verdict."""
        rows = self.rows()
        reason = verdict(rows, self._pulse.seconds) if self._pulse.seconds else None
        line = Line(token=self._token, rows=tuple(rows), verdict=reason).encode()
        for guest in self._guests:
            guest.write(line)  # not waited for: one that is stopped never takes it
        if reason:
            await asyncio.sleep(0.1)  # for the line to leave before this process does
            self._obey(reason)

    async def _welcome(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Hears one worker until it goes."""
        rank = None
        try:
            async for line in lines(reader, self._token):
                row = line.rows[0]
                self._rows[row.rank], self._heard[row.rank] = row, self._pulse.clock.now()
                if rank is None:
                    rank = row.rank
                    self._guests.add(writer)
                    await self.tell()  # at once: it wants to know whether it came to the right one
        finally:
            self._guests.discard(writer)
            writer.close()
            if rank is not None:
                self._rows[rank] = self._rows[rank].model_copy(update={"connected": False})
