"""What an actor sends to the driver while its worker runs."""

from __future__ import annotations

from typing import Any, NamedTuple


class Line(NamedTuple):
    """Complete lines of a worker's output.

    Attributes:
        text: The lines.
        is_error: Whether they came from standard error.
    """

    text: str
    is_error: bool


class Report(NamedTuple):
    """Metrics that a worker reported, and optionally a checkpoint.

    Attributes:
        metrics: Numbers by name.
        checkpoint: A folder as an uncompressed tar archive; empty: none.
    """

    metrics: dict[str, Any]
    checkpoint: bytes = b""


class Result(NamedTuple):
    """What the function of `tfdist.ray.train` returned on a worker.

    Attributes:
        pickled: Its value, pickled by cloudpickle.
    """

    pickled: bytes


class End(NamedTuple):
    """The last message: how the worker's process ended.

    Attributes:
        code: Its exit code as in a shell.
        last_words: Its traceback, or its last lines on standard error.
    """

    code: int
    last_words: str


Message = Line | Report | Result | End
