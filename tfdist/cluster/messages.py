"""Messages between workers over a stream: JSON objects, one a line."""

from __future__ import annotations

import json
from asyncio import StreamReader, StreamWriter
from typing import Any

Message = dict[str, Any]

#: Bytes that a message may have: what is known of some thousand workers. For the limit of streams.
LIMIT = 2**20


def encode(message: Message) -> bytes:
    """Returns a message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def send(writer: StreamWriter, message: Message) -> None:
    """Sends a message, without waiting until the other has taken it."""
    writer.write(encode(message))


async def receive(reader: StreamReader) -> Message | None:
    """Returns the next message; None where the connection has ended, or what comes is none.

    Raises:
        OSError: The connection broke.
    """
    try:
        message = json.loads(await reader.readline())
    except ValueError:  # no JSON, or more than a message may have
        return None
    return message if isinstance(message, dict) else None
