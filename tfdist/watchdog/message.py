"""What the workers' watchdogs send each other, and who may."""

from __future__ import annotations

from asyncio import StreamReader
from collections.abc import AsyncIterator

from pydantic import BaseModel, ConfigDict, ValidationError

from tfdist.cluster import messages
from tfdist.watchdog.report import Report


class Update(BaseModel):
    """What is sent: to rank 0 a worker's own report, from there those of all.

    Attributes:
        token: What only the workers of this run know.
        reports: As they are when this is sent.
        verdict: Rank 0's; None while all may go on.
    """

    model_config = ConfigDict(frozen=True)

    token: str
    reports: tuple[Report, ...]
    verdict: str | None = None

    def encode(self) -> bytes:
        """Returns it as it is sent."""
        return messages.encode(self.model_dump())


async def updates(reader: StreamReader, token: str) -> AsyncIterator[Update]:
    """Yields what a worker of this run sends, until its connection ends or something else comes."""
    try:
        while message := await messages.receive(reader):
            update = Update.model_validate(message)
            if update.token != token:
                return
            yield update
    except (OSError, ValidationError):  # gone; a stranger
        return
