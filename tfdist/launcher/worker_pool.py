"""A group of worker processes, started through the launcher. Imports no TensorFlow."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from typing import Any

import psutil

from tfdist.errors import LaunchError
from tfdist.launcher.orphans import marked, watching

_START_SECONDS, _ANSWER_SECONDS = 180.0, 120.0
_END_SECONDS = 30.0


class Group:
    """Processes that answer questions together; use as a context.

    While nobody asks they are stopped: threads that wait by looking again and again would take
    the processor from those that are measured.

    Args:
        maker: `"module:function"`; each worker calls it once with the arguments, which starts the
            engine and returns what answers a question.
        arguments: Of `maker`.
        num_workers: How many.
        via: What starts them, as of `python -m tfdist.launch`.
        pauses: Whether they bear being stopped: TensorFlow's servers count that as death, and
            Horovod's Gloo gives up after half a minute.

    Raises:
        LaunchError: They do not start; with what they said last.
    """

    def __init__(
        self,
        maker: str,
        *arguments: str,
        num_workers: int = 2,
        via: str = "processes",
        pauses: bool = True,
    ) -> None:
        self.num_workers, self._pauses = num_workers, pauses
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  # read when something fails
        with Listener(("127.0.0.1", 0)) as listener:
            worker = ["-m", "tfdist.launcher.pool_worker", str(listener.address[1]), maker]
            launch = ["-m", "tfdist.launch", "--num-workers", str(num_workers), "--via", via]
            command = [sys.executable, *launch, "--", sys.executable, *worker, *arguments]
            mark = uuid.uuid4().hex
            # A stopped worker would outlive this process, if that were killed.
            self._watch = contextlib.ExitStack()
            self._watch.enter_context(watching(mark))
            self._launcher = subprocess.Popen(
                command,
                env=os.environ | marked(mark),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
            )
            try:
                places = sorted((self._accept(listener) for _ in range(num_workers)), key=_rank)
            except BaseException:
                self.stop()
                raise
        self._connections = [connection for _, _, connection in places]
        self._processes = [psutil.Process(process_id) for _, process_id, _ in places]
        self._pause()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def ask(self, *question: Any) -> list[Any]:
        """Returns every worker's answer, by rank.

        Raises:
            LaunchError: They failed, or took too long.
        """
        if self._launcher.poll() is not None:
            raise LaunchError(f"the workers have ended: {self._last_words()}")
        self._resume()
        try:
            for connection in self._connections:
                connection.send(question)
            answers = [_receive(connection, _ANSWER_SECONDS) for connection in self._connections]
        except (OSError, EOFError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(5)  # one that failed has last words
            self.stop()  # the next answer would be to this question
            raise LaunchError(f"no answer to {question}: {self._last_words()}") from error
        self._pause()
        return answers

    def stop(self) -> None:
        """Ends all processes."""
        if self._launcher.poll() is None:
            self._resume()
            self._launcher.terminate()
        try:
            self._launcher.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # its watcher ends the workers
            self._launcher.kill()
            self._launcher.wait()
        self._watch.close()
        for connection in getattr(self, "_connections", ()):
            connection.close()

    def _accept(self, listener: Listener) -> tuple[int, int, Connection]:
        """Waits for the next worker; returns its rank, its process id and the way to it."""
        deadline = time.monotonic() + _START_SECONDS
        while not multiprocessing.connection.wait([listener._listener._socket], 0.2):  # type: ignore[attr-defined]
            if time.monotonic() > deadline or self._launcher.poll() is not None:
                raise LaunchError(f"the workers did not start: {self._last_words()}")
        connection = listener.accept()
        return *_receive(connection, _START_SECONDS), connection

    def _pause(self) -> None:
        if self._pauses:
            for process in self._processes:
                process.suspend()

    def _resume(self) -> None:
        if self._pauses:
            for process in getattr(self, "_processes", ()):
                process.resume()

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = [line for line in self._output.read().splitlines() if line.strip()]
        return lines[-1] if lines else "they said nothing"


def _rank(place: Sequence[Any]) -> int:
    return place[0]


def _receive(connection: Connection, seconds: float) -> Any:
    if not connection.poll(seconds):
        raise TimeoutError
    return connection.recv()
