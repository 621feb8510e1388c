"""How a worker comes to rank 0, and learns what came of it."""

from __future__ import annotations

import asyncio

from tfdist.cluster.messages import Message, receive, send
from tfdist.cluster.ports import held_ports
from tfdist.cluster.record import split
from tfdist.errors import ClusterError

_RETRY_SECONDS = 0.2


async def ask(place: str, me: Message, seconds: float) -> tuple[tuple[str, ...], list[int]]:
    """Tells rank 0 who has come, and returns the addresses and the positions of this worker's GPUs.

    Tries again while rank 0 is not there.

    Args:
        place: `"host:port"` where rank 0 listens.
        me: Who comes; its address is filled in where it has none.
        seconds: For all of it.

    Raises:
        ClusterError: Rank 0 was not there in time, or tells of a problem.
    """
    reason = "it does not answer"
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return result(await _ask_once(place, me))
                except OSError as error:  # not there yet, or its name is not known yet
                    reason = error.strerror or str(error)
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        raise ClusterError(
            f"Rank {me['rank']} waited {seconds:.0f} s for rank 0 at {place} ({reason}): see "
            "whether it was started, and whether this host reaches that address."
        ) from None


async def _ask_once(place: str, me: Message) -> Message:
    """Asks once; raises an OSError where rank 0 is not, or goes away."""
    host, port = split(place)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        own = writer.get_extra_info("sockname")[0]
        own = f"[{own}]" if ":" in own else own
        with held_ports(1) as (port,):  # until all have one, so that no two of a host are equal
            send(writer, me | {"address": me["address"] or f"{own}:{port}"})
            answer = await receive(reader)
    finally:
        writer.close()
    if answer is None:
        raise ConnectionError("it is not a worker of tfdist, or ended")
    return answer


def result(answer: Message) -> tuple[tuple[str, ...], list[int]]:
    """Returns addresses and positions of GPUs.

    Raises:
        ClusterError: With the problem that rank 0 told all workers.
    """
    if answer.get("problem"):
        raise ClusterError(answer["problem"])
    return tuple(answer["addresses"]), answer["gpus"]
