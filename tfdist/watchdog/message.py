"""Lines of JSON that the workers send each other, and who may."""

from __future__ import annotations

from asyncio import StreamReader
from collections.abc import AsyncIterator

from pydantic import BaseModel, ConfigDict, ValidationError

from tfdist.watchdog.verdict import Row

#: Bytes of a line: the table of some thousand workers.
LIMIT = 2**20


class Line(BaseModel):
    """What is sent: to rank 0 a worker's own row, from there all rows.

    Attributes:
        token: What only the workers of this run know.
        rows: As they are when the line is sent.
        verdict: Rank 0's; None while all may go on.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    token: str
    rows: tuple[Row, ...]
    verdict: str | None = None

    def encode(self) -> bytes:
        """Returns it as it is sent."""
        return self.model_dump_json().encode() + b"\n"


async def lines(reader: StreamReader, token: str) -> AsyncIterator[Line]:
    """Yields what a worker of this run sends, until its connection ends or something else comes."""
    try:
        while raw := await reader.readline():
            line = Line.model_validate_json(raw)
            if line.token != token:
                return
            yield line
    except (OSError, ValidationError, ValueError):  # gone; a stranger; a line too long
        return


def aged(row: Row, age: float) -> Row:
    """Returns a row that came so many seconds ago, as it is now."""
    return row.model_copy(update={"idle": row.idle + age, "silent": row.silent + age})
