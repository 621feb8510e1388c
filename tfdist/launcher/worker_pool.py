"""Worker processes that answer questions together: notebooks, benchmarks and tests ask them.

They are started as `python -m tfdist.launch` starts workers. Imports no TensorFlow.
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

from tfdist.errors import LaunchError
from tfdist.launcher import flags, group, mpirun, pool_worker, workers
from tfdist.launcher.child import Streams
from tfdist.launcher.children import Children
from tfdist.launcher.plan import LOCAL, Process, slots

_START_SECONDS, _ANSWER_SECONDS = 240.0, 120.0
#: For a worker's end to be known after its connection closed; mpirun ends the others first.
_END_SECONDS = 10.0
#: That workers have to save and end after Ctrl-C.
_GRACE_SECONDS = 15.0
_LOOK_SECONDS = 0.2


class WorkerPool:
    """Processes that answer questions together; use as a context.

    One that fails, or gives no answer, ends them all; the next question starts new ones.

    Args:
        make_answer: A function of a module. Each worker calls it once with the arguments, which
            starts what is to be asked and returns what answers a question.
        arguments: Of `make_answer`; pickle takes them.
        num_workers: How many.
        via: What starts them, as of `python -m tfdist.launch`; empty: nothing, so that the one
            process is told of no others.
        environ: Variables that they have beside this process's.
        answer_seconds: What an answer may take; None: any time.
        pauses: Whether they are stopped while nobody asks: threads that wait by looking again and
            again would take the processor from those that are measured. TensorFlow's servers count
            it as death, and Horovod's Gloo gives up after half a minute.
        shows: The rank whose output is shown as it comes; None: nobody's is.

    Attributes:
        num_workers: As given.
        processes: The workers that run, by rank.
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
        if kind is None:  # all have answered, and have nothing to save
            self._to_each(psutil.Process.kill)
        self._resume()  # who is stopped ends by no other signal
        self._running.__exit__(kind, error, where)  # an interrupt reaches the workers, too
        self._disconnect()
        self._group, self.processes = None, []

    def start(self) -> None:
        """Starts the workers, unless they run.

        Raises:
            LaunchError: They do not start.
        """
        if self._group:
            return
        folder = tempfile.TemporaryDirectory(prefix="tfdist-")
        with self._all_end("the workers did not start"), folder as name:
            self._start(str(Path(name, "pool")))
        self._pause()

    def ask(self, *question: Any) -> list[Any]:
        """Returns every worker's answer, by rank.

        Raises:
            LaunchError: One failed, with its traceback, or took too long.
        """
        self.start()
        self._resume()
        with self._all_end(f"no answer to {question} within {self._answer_seconds} s"):
            for connection in self._connections:
                connection.send(question)
            answers = _receive(self._connections, self._answer_seconds)
        self._pause()
        return answers

    def finish(self) -> None:
        """Lets the workers end by themselves, and waits for it.

        Raises:
            LaunchError: One failed at it.
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
        """Starts the processes, and waits until all have made what answers."""
        deadline = time.monotonic() + _START_SECONDS
        with socket.socket(socket.AF_UNIX) as listener:  # in a folder of this user alone
            listener.bind(address)
            listener.listen()
            listener.settimeout(_LOOK_SECONDS)
            command = [sys.executable, "-P", pool_worker.__file__, address]
            started = group.started(
                self._processes(command),
                grace=_GRACE_SECONDS,
                streams=self._streams,
                environ=self._environ,
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
        """What to start."""
        if not self._via:
            return [Process("0", tuple(command))]
        if self._via == "processes":
            places = slots({LOCAL: self.num_workers})
            plan = workers.plan(command, places)
            self._running.enter_context(workers.rendezvous(plan, places))
            return plan.processes
        given = ["--via", self._via, "--num-workers", str(self.num_workers)]
        return [mpirun.process(flags.parse([*given, "--", *command]))]

    def _accept(self, listener: socket.socket, deadline: float) -> Connection:
        """Waits for the next worker."""
        while time.monotonic() < deadline:
            try:
                return Connection(listener.accept()[0].detach())
            except TimeoutError:
                if self._group and (failed := self._group.wait(0)):
                    self.stop()  # its last words come
                    raise LaunchError(str(failed.failure())) from None
        raise TimeoutError

    @contextlib.contextmanager
    def _all_end(self, otherwise: str) -> Iterator[None]:
        """Within the block one worker's end is that of all: the next answer would be to this.

        Args:
            otherwise: What is told where none has failed.
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
            raise LaunchError(f"{otherwise}: {words or 'they said nothing'}") from None
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
            with contextlib.suppress(psutil.Error):  # the next question tells of its end
                act(process)

    def _disconnect(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []


def _receive(connections: Sequence[Connection], seconds: float | None) -> list[Any]:
    """Returns a message of each; raises EOFError as soon as one ends, or TimeoutError."""
    deadline = None if seconds is None else time.monotonic() + seconds
    received: dict[Connection, Any] = {}
    while pending := [one for one in connections if one not in received]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(pending, left)
        if not ready:
            raise TimeoutError
        received |= {one: one.recv() for one in pending if one in ready}
    return [received[one] for one in connections]
