"""How a worker comes to rank 0, and the lines that cross: JSON, one object each."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tfdist.cluster.ports import free_ports
from tfdist.cluster.record import split
from tfdist.errors import ClusterError

_RETRY_SECONDS = 0.2

Line = dict[str, Any]


async def visit(place: str, me: Line, seconds: float) -> tuple[str, ...]:
    """Comes to rank 0, tries again while it is not there, and returns the addresses it tells.

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
                    return result(await _ask(place, me))
                except OSError as error:  # not there yet, or its name is not known yet
                    reason = error.strerror or str(error)
                await asyncio.sleep(_RETRY_SECONDS)
    except TimeoutError:
        raise ClusterError(
            f"Rank {me['rank']} waited {seconds:.0f} s for rank 0 at {place} ({reason}): see "
            "whether it was started, and whether this host reaches that address."
        ) from None


async def _ask(place: str, me: Line) -> Line:
    """One visit; raises an OSError where rank 0 is not, or goes away."""
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


def send(writer: asyncio.StreamWriter, line: Line) -> None:
    """Sends a line."""
    writer.write(json.dumps(line).encode() + b"\n")


async def receive(reader: asyncio.StreamReader) -> Line | None:
    """Returns a line; None where what comes is none."""
    try:
        line = json.loads(await reader.readline())
    except ValueError:  # no JSON, or more than a line may hold
        return None
    return line if isinstance(line, dict) else None


def result(answer: Line) -> tuple[str, ...]:
    """Returns the addresses, or raises the problem that all were told as a ClusterError."""
    if answer.get("problem"):
        raise ClusterError(answer["problem"])
    return tuple(answer["addresses"])
