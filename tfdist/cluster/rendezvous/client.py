"""How a worker comes to rank 0, and the messages that cross: lines of JSON, one object each."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tfdist.cluster.ports import free_ports
from tfdist.cluster.record import split
from tfdist.errors import ClusterError

_RETRY_SECONDS = 0.2

Message = dict[str, Any]


async def ask(place: str, me: Message, seconds: float) -> tuple[str, ...]:
    """Tells rank 0 who has come, again while it is not there, and returns the addresses it answers.

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
        send(writer, me | {"address": me["address"] or f"{own}:{free_ports(1)[0]}"})
        answer = await receive(reader)
    finally:
        writer.close()
    if answer is None:
        raise ConnectionError("it is not a worker of tfdist, or ended")
    return answer


def send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Sends a message."""
    writer.write(json.dumps(message).encode() + b"\n")


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """Returns a message; None where what comes is none."""
    try:
        message = json.loads(await reader.readline())
    except ValueError:  # no JSON, or more than a line may hold
        return None
    return message if isinstance(message, dict) else None


def result(answer: Message) -> tuple[str, ...]:
    """Returns the addresses, or raises the problem that all were told as a ClusterError."""
    if answer.get("problem"):
        raise ClusterError(answer["problem"])
    return tuple(answer["addresses"])
