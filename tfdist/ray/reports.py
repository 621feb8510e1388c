"""Sends metrics, checkpoints and results from a worker to the caller of `tfdist.ray.train`.

The worker's process connects to a Unix socket of its actor, in a folder that only its user can
enter. It receives the function, and sends reports and the function's result. Its later connections
receive rows of datasets.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Client, Connection, Listener
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

from tfdist import cluster
from tfdist.console import folders, threads
from tfdist.errors import LaunchError

#: The variable with the path of the socket.
_VARIABLE = "TFDIST_RAY_CHANNEL"

_connection: Connection | None = None


def report(metrics: Mapping[str, Any], checkpoint: str | os.PathLike[str] | None = None) -> None:
    """Reports metrics from the function that `tfdist.ray.train` runs.

    Within a trial of Ray Tune they are passed to Tune, whose scheduler may stop the trial. Every
    worker may call it; only the report of rank 0 is used.

    Example:
        >>> def fn():
        ...     import tfdist.ray
        ...
        ...     tfdist.ray.report({"loss": 0.5})  # within a trial of Ray Tune, the trial's result
        >>> tfdist.ray.train(fn, num_workers=1)

    Args:
        metrics: Numbers by name.
        checkpoint: A folder, which is sent through Ray's object store. Save large checkpoints to
            shared storage instead (`Trainer(checkpoints=...)`).

    Raises:
        LaunchError: This process is not a worker of `tfdist.ray.train`.
    """
    if _connection is None:
        raise LaunchError(
            "tfdist.ray.report was called outside of a function that tfdist.ray.train runs: call "
            "it there, or remove the call."
        )
    if cluster.is_chief():
        packed = b"" if checkpoint is None else _pack(checkpoint)
        numbers = {n: v.item() if hasattr(v, "item") else v for n, v in metrics.items()}
        _connection.send(Report(numbers, packed))


def unpack(packed: bytes, folder: str) -> None:
    """Writes the files of a reported checkpoint to a folder."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def receive_function() -> bytes:
    """Connects a worker to its actor, and returns the pickled function to call."""
    global _connection
    _connection = Client(os.environ[_VARIABLE], "AF_UNIX")
    return bytes(_connection.recv())


def connect_for_data() -> Connection:
    """Opens another connection from a worker to its actor, to receive rows of datasets.

    Raises:
        LaunchError: This process is not a worker of `tfdist.ray.train`.
    """
    if _VARIABLE not in os.environ:
        raise LaunchError(
            "tfdist.ray.dataset was called outside of a function that tfdist.ray.train runs: call "
            "it there, and pass datasets={...} to tfdist.ray.train."
        )
    return Client(os.environ[_VARIABLE], "AF_UNIX")


def send_result(pickled: bytes) -> None:
    """Sends the pickled return value of the function from a worker to its actor."""
    if _connection is None:
        raise LaunchError("A result was sent before the function was received.")
    _connection.send(Result(pickled))
    _connection.recv()  # wait for the acknowledgement, so that this process may exit


class Channel:
    """The actor's side of the connection. Use it as a context manager."""

    def __init__(
        self,
        function: bytes,
        put: Callable[[Report | Result], None],
        datasets: Mapping[str, Blocks] = MappingProxyType({}),
    ) -> None:
        self._function, self._put, self._datasets = function, put, datasets
        self._folder = folders.sockets()
        self._listener = Listener(f"{self._folder.name}/channel", "AF_UNIX", backlog=16)
        self.environ = {_VARIABLE: str(self._listener.address)}

    def __enter__(self) -> Channel:
        threads.start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            threads.start(self._serve_worker, self._listener.accept())
            while True:
                threads.start(send_rows, self._listener.accept(), self._datasets)

    def _serve_worker(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, EOFError), connection:
            connection.send(self._function)
            while True:
                message = connection.recv()
                self._put(message)
                if isinstance(message, Result):
                    connection.send(True)


def _pack(folder: str | os.PathLike[str]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        archive.add(folder, arcname=".")
    return written.getvalue()


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
    """The return value of the function that `tfdist.ray.train` ran on a worker."""

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


# ---- rows of datasets ----


class Blocks(NamedTuple):
    """An executed dataset, in Ray's object store."""

    refs: tuple[Any, ...]
    sizes: tuple[int, ...]

    def slices(self, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """Yields each block with rows from `start` to `stop`, and the range of these rows in it."""
        ends = itertools.accumulate(self.sizes)
        for ref, size, end in zip(self.refs, self.sizes, ends, strict=True):
            first, last = max(start - end + size, 0), min(stop - end + size, size)
            if first < last:
                yield ref, first, last

    def rows(self, start: int, stop: int, num_rows: int) -> Iterator[dict[str, Any]]:
        """Yields arrays of at most `num_rows` rows, by column."""
        import ray
        from ray.data.block import BlockAccessor

        for ref, first, last in self.slices(start, stop):
            table = ray.get(ref)
            for begin in range(first, last, num_rows):
                rows = table.slice(begin, min(num_rows, last - begin))
                yield BlockAccessor.for_block(rows).to_numpy()


def execute(datasets: Mapping[str, Any]) -> dict[str, Blocks]:
    """Executes Ray datasets, by name, and returns their blocks."""
    import ray

    size_of = ray.remote(num_cpus=0)(lambda table: table.num_rows)
    refs = {name: dataset.to_arrow_refs() for name, dataset in datasets.items()}
    sizes = {name: ray.get([size_of.remote(ref) for ref in refs[name]]) for name in refs}
    return {name: Blocks(tuple(refs[name]), tuple(sizes[name])) for name in refs}


def send_rows(connection: Connection, datasets: Mapping[str, Blocks]) -> None:
    """Receives a request, and sends the dataset's number of rows, the rows, and an empty dict.

    If the rows cannot be read, it sends a string with the reason.
    """
    with connection, contextlib.suppress(OSError, EOFError):  # the worker closed the connection
        name, start, stop, num_rows = connection.recv()
        if name not in datasets:
            names = ", ".join(sorted(datasets)) or "none"
            connection.send(f"tfdist.ray.train has no dataset {name!r}. Its datasets: {names}.")
            return
        connection.send(sum(datasets[name].sizes))
        try:
            for rows in datasets[name].rows(start, stop, num_rows):
                connection.send(rows)
        except Exception as error:  # Ray raises errors of many types, such as for a lost node
            if isinstance(error, OSError):
                raise
            connection.send(f"Rows of the Ray dataset {name!r} cannot be read: {error}")
        connection.send({})
