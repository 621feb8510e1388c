"""Worker processes that handle requests together, for notebooks, benchmarks and tests.

They are started as by `python -m tfdist.launch`. Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import psutil

from tfdist.cluster.launcher import mpirun, options, plan, pool_worker, processes
from tfdist.cluster.launcher.plan import LOCAL, Process, slots
from tfdist.cluster.launcher.processes import Children, Streams
from tfdist.cluster.messages import secret_environ
from tfdist.console import folders
from tfdist.errors import LaunchError

_START_SECONDS, _REQUEST_SECONDS = 240.0, 120.0
#: Time to wait for a worker's exit code after its connection closed. mpirun first terminates the
#: other workers.
_END_SECONDS = 10.0
#: Time for workers to save and exit after Ctrl-C.
_GRACE_SECONDS = 15.0
_POLL_SECONDS = 0.2


class WorkerPool:
    """Processes that handle requests together. Use it as a context manager.

    If one fails or does not respond, all are terminated; the next request starts new processes.

    Args:
        make_handler: A module-level function. Each worker calls it once with the arguments. It
            returns the function that handles a request.
        *arguments: Picklable arguments of `make_handler`.
        num_workers: Number of workers.
        via: How to start them, as `--via` of `python -m tfdist.launch`; empty: a single process
            without the environment variables of a launcher.
        environ: Environment variables in addition to this process's.
        timeout_seconds: Time limit of a request; None: no limit.
        pauses: Whether to suspend workers between requests, so that busy-waiting threads do not
            disturb measurements. Not for TensorFlow's servers, which treat it as a failure, nor for
            long pauses with Horovod's Gloo, which times out after half a minute.
        shows: The rank whose output is shown; None: no output is shown.
    """

    def __init__(
        self,
        make_handler: Callable[..., Callable[..., Any]],
        *arguments: Any,
        num_workers: int = 2,
        via: str = "processes",
        environ: Mapping[str, str] = MappingProxyType({}),
        timeout_seconds: float | None = _REQUEST_SECONDS,
        pauses: bool = False,
        shows: int | None = None,
    ) -> None:
        self._task = (make_handler, arguments)
        self.num_workers, self._via, self._environ = num_workers, via, environ
        self._timeout_seconds, self._pauses = timeout_seconds, pauses
        self._streams = Streams(only="" if shows is None else str(shows))
        self._running = contextlib.ExitStack()
        self._group: Children | None = None
        self._connections: list[Connection] = []
        self.processes: list[psutil.Process] = []

    def __enter__(self) -> WorkerPool:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if kind is None:  # all requests are done, and there is nothing to save
            self._for_each(psutil.Process.kill)
        self._resume()  # a suspended process handles no other signal
        self._running.__exit__(kind, error, where)  # sends an interrupt to the workers too
        self._disconnect()
        self._group, self.processes = None, []

    def start(self) -> None:
        """Starts the workers if they are not running.

        Raises:
            LaunchError: The workers cannot be started.
        """
        if self._group:
            return
        folder = folders.sockets()
        with self._stopping_on_error("the workers did not start"), folder as name:
            address = str(Path(name, "pool"))
            deadline = time.monotonic() + _START_SECONDS
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)  # in a folder that only this user can access
                listener.listen()
                listener.settimeout(_POLL_SECONDS)
                command = [sys.executable, "-P", pool_worker.__file__, address]
                started = processes.started(
                    self._processes(command),
                    grace=_GRACE_SECONDS,
                    streams=self._streams,
                    environ={**self._environ, **secret_environ()},
                )
                self._group = self._running.enter_context(started)
                while len(self._connections) < self.num_workers:
                    self._connections.append(self._accept(listener, deadline))
            for connection in self._connections:
                connection.send(sys.path)
                connection.send(self._task)
            ready = _receive(self._connections, deadline - time.monotonic())
            pairs = zip(ready, self._connections, strict=True)
            by_rank = dict(sorted(pairs, key=lambda pair: pair[0]))
            self._connections = list(by_rank.values())
            self.processes = [psutil.Process(process_id) for _, process_id in by_rank]
        self._pause()

    def ask(self, *request: Any) -> list[Any]:
        """Sends a request to every worker, and returns the responses by rank.

        Raises:
            LaunchError: A worker failed (the message has its traceback) or took too long.
        """
        self.start()
        self._resume()
        with self._stopping_on_error(f"no response to {request} within {self._timeout_seconds} s"):
            for connection in self._connections:
                connection.send(request)
            responses = _receive(self._connections, self._timeout_seconds)
        self._pause()
        return responses

    def finish(self) -> None:
        """Waits for the workers to exit.

        Raises:
            LaunchError: A worker failed.
        """
        if self._group is None:
            return
        self._resume()
        self._disconnect()
        failed = self._group.wait()
        self.stop()
        if failed:
            raise LaunchError(str(failed.failure()))

    def stop(self) -> None:
        """Terminates the workers."""
        self.__exit__(None, None, None)

    def _processes(self, command: Sequence[str]) -> list[Process]:
        if not self._via:
            return [Process("0", tuple(command))]
        if self._via == "processes":
            local_slots = slots({LOCAL: self.num_workers})
            planned = plan.workers(command, local_slots)
            self._running.enter_context(plan.rendezvous(planned, local_slots))
            return planned.processes
        given = ["--via", self._via, "--num-workers", str(self.num_workers)]
        return [mpirun.process(options.parse([*given, "--", *command]))]

    def _accept(self, listener: socket.socket, deadline: float) -> Connection:
        while time.monotonic() < deadline:
            try:
                return Connection(listener.accept()[0].detach())
            except TimeoutError:
                if self._group and (failed := self._group.wait(0)):
                    self.stop()  # also reads the remaining output
                    raise LaunchError(str(failed.failure())) from None
        raise TimeoutError

    @contextlib.contextmanager
    def _stopping_on_error(self, message: str) -> Iterator[None]:
        """Terminates all workers if the block fails, because they may still send a late response.

        Args:
            message: The error message if no worker has failed.
        """
        try:
            yield
        except (OSError, EOFError) as error:
            timed_out, group = isinstance(error, TimeoutError), self._group
            failed = group.wait(_END_SECONDS) if group and not timed_out else None
            self.__exit__(*sys.exc_info())
            if failed:
                raise LaunchError(str(failed.failure())) from None
            output = group.error_output() if group else str(error)
            raise LaunchError(f"{message}: {output or 'no output'}") from None
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def _pause(self) -> None:
        if self._pauses:
            self._for_each(psutil.Process.suspend)

    def _resume(self) -> None:
        if self._pauses:
            self._for_each(psutil.Process.resume)

    def _for_each(self, act: Callable[[psutil.Process], None]) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.Error):  # it has ended, which the next request detects
                act(process)

    def _disconnect(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []


def _receive(connections: Sequence[Connection], seconds: float | None) -> list[Any]:
    """Returns a message per connection; raises EOFError if one closes, or TimeoutError."""
    deadline = None if seconds is None else time.monotonic() + seconds
    received: dict[Connection, Any] = {}
    while pending := [c for c in connections if c not in received]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(pending, left)
        if not ready:
            raise TimeoutError
        received |= {c: c.recv() for c in pending if c in ready}
    return [received[c] for c in connections]
