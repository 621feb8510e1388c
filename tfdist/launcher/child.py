"""One process of a group: started, heard, signalled."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from tfdist.errors import REQUEUE, LaunchError
from tfdist.launcher.output import Relay
from tfdist.launcher.plan import Process


class Failure(NamedTuple):
    """A process that failed.

    Attributes:
        name: Its name.
        code: Its exit code as a shell has it: 128 and the number, where a signal ended it.
        last_words: Its traceback, or its last lines on standard error.
        ended: The names of those that had ended well by then, in their order: the others may have
            failed for want of them.
    """

    name: str
    code: int
    last_words: str
    ended: tuple[str, ...] = ()

    @property
    def preempted(self) -> bool:
        """Whether the run has saved what it had, and asks to be started again."""
        return self.code == REQUEUE

    def __str__(self) -> str:
        if self.preempted:
            return f"{_who(self.name)} was preempted, and all stopped: the same command goes on."
        how = f"exit code {self.code}"
        if self.code > 128 and self.code - 128 in set(signal.Signals):
            how = f"signal {signal.Signals(self.code - 128).name}"
        words = f":\n{self.last_words}" if self.last_words else "."
        if not self.ended:
            return f"{_who(self.name)} was the first to fail, with {how}{words}"
        first = " and ".join(map(_who, self.ended))
        return (
            f"{first} ended first, with exit code 0; then {_who(self.name)} failed, with "
            f"{how}{words}"
        )


def _who(name: str) -> str:
    return f"rank {name}" if name.isdecimal() else name


@dataclass(frozen=True)
class Streams:
    """Where output goes.

    Attributes:
        only: The name of the one process that is shown, without its name; None: all are; empty:
            none is.
        out: For standard output; None: this process's.
        err: For standard error; None: this process's.
    """

    only: str | None = None
    out: TextIO | None = None
    err: TextIO | None = None

    def relay(self, name: str) -> Relay:
        """Returns what passes on the output of the process of that name."""
        if self.only not in (None, name):
            return Relay(name, None, None)
        return Relay("" if self.only else name, self.out or sys.stdout, self.err or sys.stderr)


class Child:
    """A process of a group.

    Args:
        process: What to start.
        environ: Variables that all of the group have.
        streams: Where its output goes.
    """

    def __init__(self, process: Process, environ: Mapping[str, str], streams: Streams) -> None:
        self.process = process
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}  # unless the user says otherwise
        own = {"PYTHONUNBUFFERED": "1", **process.environ, **environ}
        self._environ = {**quiet, **os.environ, **own}
        self._relay = streams.relay(process.name)
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self, ended: Callable[[Child], None]) -> None:
        """Starts it; `ended` is called from a thread when it has ended.

        Raises:
            LaunchError: It cannot be started.
        """
        try:
            popen = subprocess.Popen(
                self.process.command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's signals come by way of the launcher
            )
        except OSError as error:
            raise LaunchError(
                f"{self.process.command[0]!r} cannot be started ({error.strerror}): "
                "expected a program and its arguments after --."
            ) from None
        self._popen = popen
        self._relay.start(popen)

        def wait() -> None:
            popen.wait()
            ended(self)

        threading.Thread(target=wait, daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether it has been started, and has not ended."""
        return self._popen is not None and self._popen.returncode is None

    @property
    def code(self) -> int:
        """The exit code of one that has ended, as a shell has it."""
        code = self._popen.returncode if self._popen else 0
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        if self._popen and self.running:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._popen.pid, number)

    def drain(self) -> None:
        """Lets the rest of its output come."""
        self._relay.join(1.0)

    def failure(self) -> Failure:
        """Returns how one failed that has ended."""
        return Failure(self.process.name, self.code, self._relay.last_words())
