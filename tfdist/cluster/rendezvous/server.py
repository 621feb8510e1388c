"""The workers come together at rank 0's address before TensorFlow starts there.

Rank 0 listens, the others come and say who they are, and when all have come, or something is wrong,
everyone is told the same. So a worker that never comes, two that claim one rank, or a port in use
are an error on all within a bounded time, where TensorFlow would wait. Messages are lines of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfdist.cluster import gpus as gpus_of_workers
from tfdist.cluster.messages import Message, receive, send
from tfdist.cluster.ports import check_free, held_ports
from tfdist.cluster.record import Cluster, split
from tfdist.cluster.rendezvous.client import ask, result
from tfdist.errors import ClusterError

#: For one message to cross the wire; who takes longer is no worker.
_MESSAGE_SECONDS = 10.0


def meet(
    cluster: Cluster, seconds: float, gpus: Sequence[str] = (), share_gpus: bool = False
) -> tuple[tuple[str, ...], list[int]]:
    """Returns what `addresses` are, and this worker's GPUs, when all workers have come to rank 0.

    Args:
        cluster: Its `addresses` are checked where it has them; else each worker chooses a free port
            on the interface from which it reached `master`.
        seconds: How long to wait for the others.
        gpus: Identifiers of the GPUs that this worker sees or asks for.
        share_gpus: Whether several workers may use one GPU; rank 0's counts.

    Returns:
        `"host:port"` of every worker, by rank, and the positions in `gpus` of those to use.

    Raises:
        ClusterError: Workers did not come, claim the same rank, disagree about the cluster, or
            cannot listen where they are to; or the GPUs cannot be divided.
    """
    me: Message = {
        "rank": cluster.rank,
        "cluster": [cluster.size, *cluster.addresses],
        "address": cluster.address,
        "problem": "",
        "gpus": list(gpus),
    }
    place = cluster.addresses[0] if cluster.addresses else cluster.master
    if cluster.rank == 0:
        return _run(_Host(cluster, place, me, seconds, share_gpus).run())
    if cluster.addresses:
        try:
            check_free(cluster.address)
        except ClusterError as error:  # the others want to know, too
            me["problem"] = str(error)
    # A little longer than rank 0 waits, who can tell which others are missing.
    return _run(ask(place, me, seconds + _MESSAGE_SECONDS))


class _Host:
    """Rank 0, who waits for the others."""

    def __init__(
        self, cluster: Cluster, place: str, me: Message, seconds: float, share_gpus: bool = False
    ) -> None:
        self._size, self._place, self._me, self._seconds = cluster.size, place, me, seconds
        self._addresses = {0: cluster.address}
        self._gpus, self._share_gpus = {0: me["gpus"]}, share_gpus
        self._connections: list[tuple[int, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._problem = ""
        self._complete = asyncio.Event()

    async def run(self) -> tuple[tuple[str, ...], list[int]]:
        """Waits for all, tells them what came out, and returns it."""
        with held_ports(1) as (port,):
            # Others have reached rank 0 by this name, so it is the one to give them.
            self._addresses[0] = self._addresses[0] or f"{self._place.rpartition(':')[0]}:{port}"
            return await self._run()

    async def _run(self) -> tuple[tuple[str, ...], list[int]]:
        try:
            server = await asyncio.start_server(self._receive, None, split(self._place)[1])
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                await self._ask_who_listens()
            reason = os.strerror(error.errno or 0)  # asyncio's own text speaks of 0.0.0.0
            raise ClusterError(
                f"Rank 0 is to listen at {self._place}, but cannot ({reason}): end what listens "
                "there, or choose another port."
            ) from None
        try:
            if self._size > 1:
                await asyncio.wait_for(self._complete.wait(), self._seconds)
        except TimeoutError:
            missing = [str(rank) for rank in range(self._size) if rank not in self._addresses]
            self._problem = (
                f"Rank {', '.join(missing)} of {self._size} did not come to rank 0 at "
                f"{self._place} within {self._seconds:.0f} s: see whether it was started, and "
                "reaches that address."
            )
        server.close()  # the port is TensorFlow's now
        addresses = tuple(self._addresses.get(rank, "") for rank in range(self._size))
        divided: list[list[int]] = []
        if not self._problem:
            try:
                claims = [self._gpus[rank] for rank in range(self._size)]
                divided = gpus_of_workers.divide(claims, self._share_gpus)
            except ClusterError as error:
                self._problem = str(error)

        def answer(rank: int) -> Message:
            own = divided[rank] if divided else []
            return {"problem": self._problem, "addresses": addresses, "gpus": own}

        await asyncio.gather(
            *(_answer(reader, writer, answer(rank)) for rank, reader, writer in self._connections)
        )
        return result(answer(0))

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes in what one worker says of itself."""
        worker = None
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_MESSAGE_SECONDS):
                worker = await receive(reader)
        if worker is None or worker.keys() != self._me.keys():
            writer.close()  # a stranger: port scanners come to every open port
            return
        rank = worker["rank"]
        self._connections.append((rank, reader, writer))
        if worker["cluster"] != self._me["cluster"]:
            self._problem = (
                f"Rank {rank} and rank 0 know different clusters: {worker['cluster']} and "
                f"{self._me['cluster']}. Give all workers the same addresses."
            )
        elif rank in self._addresses:
            self._problem = f"Two workers are rank {rank}: give each a rank, or index, of its own."
        elif worker["problem"]:
            self._problem = f"Rank {rank}: {worker['problem']}"
        else:
            self._addresses[rank], self._gpus[rank] = worker["address"], worker["gpus"]
        if self._problem or len(self._addresses) == self._size:
            self._complete.set()

    async def _ask_who_listens(self) -> None:
        """Tells both where it is another worker who claims to be rank 0."""
        try:
            await ask(self._place, self._me, _MESSAGE_SECONDS)
        except ClusterError as error:
            if "Two workers" in str(error):
                raise


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Message
) -> None:
    """Tells one worker what came out, if it is still there."""
    send(writer, answer)
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_MESSAGE_SECONDS):
            await reader.read()  # who closes first blocks its port for a while: not rank 0's
    writer.close()


def _run(
    coroutine: Coroutine[Any, Any, tuple[tuple[str, ...], list[int]]],
) -> tuple[tuple[str, ...], list[int]]:
    """Runs it to its end, in a thread where a notebook's own loop has this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
