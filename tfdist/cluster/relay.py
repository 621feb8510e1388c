"""Sends one long message of rank 0 to all workers, along a tree.

Rank r receives it from rank (r - 1) // `FANOUT`, and forwards it to its children. Each worker sends
it at most `FANOUT` times, and it arrives after log(n) / log(`FANOUT`) hops with n workers: four for
4,096 workers.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tfdist.cluster import messages
from tfdist.cluster.record import joined, split
from tfdist.errors import ClusterError

#: Children of each worker.
FANOUT = 16
#: Time limit for receiving the message from a parent, and for a child to fetch it.
_SECONDS = 30.0


def parent_of(rank: int) -> int:
    """Returns the rank from which a rank other than 0 receives the message."""
    return (rank - 1) // FANOUT


class Relay:
    """A worker's node in the tree. Use it as an asynchronous context manager.

    Args:
        rank: Rank of this worker.
        size: Number of workers.
        host: Address at which children reach this worker.

    Attributes:
        address: `"host:port"` at which children fetch the message; empty without children.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        self._rank, self._host = rank, host
        first = FANOUT * rank + 1
        self._unserved = set(range(first, min(first + FANOUT, size)))
        self._message: Mapping[str, Any] | None = None
        self._is_known, self._all_served = asyncio.Event(), asyncio.Event()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> Relay:
        if self._unserved:
            self._server = await asyncio.start_server(
                self._serve, self._host, 0, limit=messages.FIRST_LIMIT, backlog=FANOUT
            )
            port = self._server.sockets[0].getsockname()[1]
            self.address = joined(self._host, port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._server:
            self._server.close()

    async def pass_on(self, message: Mapping[str, Any]) -> None:
        """Sends the message to all children that request it in time."""
        self._message = message
        self._is_known.set()
        if self._unserved:  # a missing child raises an error itself, or is reported by rank 0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_served.wait(), _SECONDS)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_SECONDS):
                session = await messages.greet(writer, messages.job_key())
                request = await messages.receive(reader, session)
                if request is not None:
                    await self._is_known.wait()
                    writer.write(session.sign(self._message))
                    await reader.read()  # wait until the child has received it
                    self._unserved.discard(request.get("rank", -1))
        writer.close()
        if not self._unserved:
            self._all_served.set()


async def fetch(address: str, rank: int) -> Mapping[str, Any]:
    """Returns the message from this worker's parent.

    Args:
        address: Address of the parent's relay.
        rank: Rank of this worker.

    Raises:
        ClusterError: The parent does not send the message in time, or has ended.
    """
    message = None
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_SECONDS):
            reader, writer = await asyncio.open_connection(*split(address), limit=messages.LIMIT)
            try:
                session = await messages.answer(reader, messages.job_key())
                writer.write(session.sign({"rank": rank}))
                message = await messages.receive(reader, session)
            finally:
                writer.close()
    if message is None:
        raise ClusterError(
            f"Rank {rank} did not receive the workers' addresses from rank {parent_of(rank)} at "
            f"{address}. Check whether that process is running, and whether this host can reach it."
        )
    return message
