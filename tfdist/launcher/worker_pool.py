"""Worker processes that answer questions together, for notebooks, benchmarks and tests.

They are started as by `python -m tfdist.launch`. Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import psutil

from tfdist.cluster.messages import secret_environ
from tfdist.errors import LaunchError
from tfdist.launcher import mpirun, options, plan, pool_worker, processes
from tfdist.launcher.plan import LOCAL, Process, slots
from tfdist.launcher.processes import Children, Streams

_START_SECONDS, _ANSWER_SECONDS = 240.0, 120.0
#: Time until a worker's exit code is known after its connection closed; mpirun ends the others
#: first.
_END_SECONDS = 10.0
#: Time for workers to save and exit after Ctrl-C.
_GRACE_SECONDS = 15.0
_POLL_SECONDS = 0.2


class WorkerPool:
    """Processes that answer questions together; use it as a context manager.

    When one fails or gives no answer, all end; the next question starts new ones.

    Args:
        make_answer: A function of a module. Each worker calls it once with the arguments; it
            returns the function that answers a question.
        arguments: Arguments of `make_answer`; picklable.
        num_workers: Number of workers.
        via: What starts them, as in `python -m tfdist.launch`; empty: a single process is started,
            without the variables of a launcher.
        environ: Variables in addition to this process's.
        answer_seconds: Time limit of an answer; None: no limit.
        pauses: Whether workers are stopped between questions, so that threads that wait actively do
            not disturb measurements. TensorFlow's servers take it for a failure, and Horovod's Gloo
            gives up after half a minute.
        shows: The rank whose output is shown; None: no output is shown.

    Attributes:
        num_workers: As given.
        processes: The running workers, by rank.
    """

    def __init__(
        self,
        make_answer: Callable[..., Callable[..., Any]],
        *arguments: Any,
        num_workers: int = 2,
        via: str = "processes",
        environ: Mapping[str, str] = MappingProxyType({}),
        answer_seconds: float | None = _ANSWER_SECONDS,
        pauses: bool = False,
        shows: int | None = None,
    ) -> None:
        self._task = (make_answer, arguments)
        self.num_workers, self._via, self._environ = num_workers, via, environ
        self._answer_seconds, self._pauses = answer_seconds, pauses
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
        if kind is None:  # all have answered, and there is nothing to save
            self._to_each(psutil.Process.kill)
        self._resume()  # a stopped process ends by no other signal
        self._running.__exit__(kind, error, where)  # an interrupt reaches the workers as well
        self._disconnect()
        self._group, self.processes = None, []

    def start(self) -> None:
        """Starts the workers, unless they are running.

        Raises:
            LaunchError: They do not start.
        """
        if self._group:
            return
        folder = tempfile.TemporaryDirectory(prefix="tfdist-")
        with self._ending_all("the workers did not start"), folder as name:
            self._start(str(Path(name, "pool")))
        self._pause()

    def ask(self, *question: Any) -> list[Any]:
        """Returns every worker's answer, by rank.

        Raises:
            LaunchError: A worker failed (the message has its traceback) or took too long.
        """
        self.start()
        self._resume()
        with self._ending_all(f"no answer to {question} within {self._answer_seconds} s"):
            for connection in self._connections:
                connection.send(question)
            answers = _receive(self._connections, self._answer_seconds)
        self._pause()
        return answers

    def finish(self) -> None:
        """Waits for the workers to end by themselves.

        Raises:
            LaunchError: One failed.
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
        """Ends the workers."""
        self.__exit__(None, None, None)

    def _start(self, address: str) -> None:
        """Starts the processes, and waits until all can answer."""
        deadline = time.monotonic() + _START_SECONDS
        with socket.socket(socket.AF_UNIX) as listener:  # in a folder that only this user can enter
            listener.bind(address)
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
        by_rank = dict(sorted(zip(ready, self._connections, strict=True), key=lambda one: one[0]))
        self._connections = list(by_rank.values())
        self.processes = [psutil.Process(process_id) for _, process_id in by_rank]

    def _processes(self, command: Sequence[str]) -> list[Process]:
        """Returns the processes to start."""
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
        """Waits for the next worker to connect."""
        while time.monotonic() < deadline:
            try:
                return Connection(listener.accept()[0].detach())
            except TimeoutError:
                if self._group and (failed := self._group.wait(0)):
                    self.stop()  # which reads the rest of its output
                    raise LaunchError(str(failed.failure())) from None
        raise TimeoutError

    @contextlib.contextmanager
    def _ending_all(self, otherwise: str) -> Iterator[None]:
        """Ends all workers if the block fails: their next answer would belong to this question.

        Args:
            otherwise: The message if no worker has failed.
        """
        try:
            yield
        except (OSError, EOFError) as error:
            late, running = isinstance(error, TimeoutError), self._group
            failed = running.wait(_END_SECONDS) if running and not late else None
            self.__exit__(*sys.exc_info())
            if failed:
                raise LaunchError(str(failed.failure())) from None
            words = running.last_words() if running else str(error)
            raise LaunchError(f"{otherwise}: {words or 'no output'}") from None
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def _pause(self) -> None:
        if self._pauses:
            self._to_each(psutil.Process.suspend)

    def _resume(self) -> None:
        if self._pauses:
            self._to_each(psutil.Process.resume)

    def _to_each(self, act: Callable[[psutil.Process], None]) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.Error):  # the next question finds that it has ended
                act(process)

    def _disconnect(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []


def _receive(connections: Sequence[Connection], seconds: float | None) -> list[Any]:
    """Returns a message of each; raises EOFError as soon as one closes, or TimeoutError."""
    deadline = None if seconds is None else time.monotonic() + seconds
    received: dict[Connection, Any] = {}
    while pending := [one for one in connections if one not in received]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(pending, left)
        if not ready:
            raise TimeoutError
        received |= {one: one.recv() for one in pending if one in ready}
    return [received[one] for one in connections]
