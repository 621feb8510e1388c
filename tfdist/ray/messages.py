"""Messages that an actor sends to the driver while its worker runs."""

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
        checkpoint: A folder as an uncompressed tar archive; empty if there is no checkpoint.
    """

    metrics: dict[str, Any]
    checkpoint: bytes = b""


class Result(NamedTuple):
    """The return value of the function that `tfdist.ray.train` ran on a worker.

    Attributes:
        pickled: The value, pickled by cloudpickle.
    """

    pickled: bytes


class End(NamedTuple):
    """The last message: how the worker's process ended.

    Attributes:
        code: Its exit code, as a shell reports it.
        error_output: Its traceback, or its last lines on standard error.
    """

    code: int
    error_output: str


Message = Line | Report | Result | End
