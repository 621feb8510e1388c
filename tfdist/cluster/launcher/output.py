"""Relays the output of workers line by line, with the worker's name before each line.

`python -m tfdist.cluster.launcher.output COMMAND ...` runs a command that mpirun starts, with its
rank before each line. mpirun has a flag for that, but Open MPI puts the name before each part of a
line, and the format differs between MPI implementations.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO, TextIO

from tfdist.cluster.environments import read_mpi
from tfdist.console import streams, threads
from tfdist.errors import exit_code

_TRACEBACK = "Traceback (most recent call last):"
_KEPT_LINES = 400
_DRAIN_SECONDS = 1.0
#: Exit code of shells for a program that does not exist.
_NOT_FOUND = 127

#: Messages that TensorFlow's libraries print at any log level while loading, on missing drivers.
#: mpirun and horovodrun may put a rank before it.
_NOISE = re.compile(
    r"^(\[[\d,]+\](<\w+>:)? ?)?(WARNING: All log messages before absl::InitializeLog\(\) is called "
    r"|I0000 00:00:[\d.]+ +\d+ \w+\.cc:)"
)


class Relay:
    """Relays the output of one process, in threads, line by line.

    Args:
        name: Put in brackets before each line; empty: no prefix.
        out: Where standard output goes; None: nowhere.
        err: Where standard error goes; None: nowhere.
    """

    #: Held by any relay while it writes a line.
    _lock = threading.Lock()

    def __init__(self, name: str, out: TextIO | None, err: TextIO | None) -> None:
        self._prefix = f"[{name}] " if name else ""
        self._out, self._err = out, err
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self._threads: list[threading.Thread] = []
        self._num_lines = 0

    def start(self, child: subprocess.Popen[bytes]) -> None:
        """Reads the pipes of a process until they end."""
        for pipe, is_error in ((child.stdout, False), (child.stderr, True)):
            self._threads.append(threads.start(self._relay, pipe, is_error))

    def write(self, text: str, is_error: bool) -> None:
        """Relays complete lines that another process has read."""
        for line in text.splitlines():
            self._show(line, is_error)

    def join(self, seconds: float) -> None:
        """Waits for the remaining output, with a time limit: a grandchild may keep a pipe open."""
        for thread in self._threads:
            thread.join(seconds)

    def finish(self) -> None:
        """Waits for the remaining output as long as lines arrive, or wait for a slow reader.

        A process that is not one of the run's may keep a pipe open.
        """
        for thread in self._threads:
            num_before = -1
            while thread.is_alive() and (self._num_lines > num_before or self._lock.locked()):
                num_before = self._num_lines
                thread.join(_DRAIN_SECONDS)

    def error_output(self) -> str:
        """Returns the watchdog's verdict, else the last traceback, else the last error lines."""
        lines = list(self._errors)
        if verdict := _verdict(lines):
            return verdict
        starts = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
        if not starts:
            return "\n".join(lines[-10:])
        tag = lines[starts[-1]].removesuffix(_TRACEBACK)  # the rank, if this relays mpirun's output
        return "\n".join(line for line in lines[starts[-1] :] if line.startswith(tag))

    def _relay(self, pipe: IO[bytes], is_error: bool) -> None:
        try:
            for raw in pipe:
                # A progress bar rewrites its line after a carriage return. Keep its last state.
                line = raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
                if is_error and _NOISE.match(line):
                    continue
                if is_error:
                    self._errors.append(line)
                self._num_lines += 1
                self._show(line, is_error)
        except Exception as error:
            threads.fail(error)
            for _ in pipe:  # a process blocks while its pipe is full
                pass

    def _show(self, line: str, is_error: bool) -> None:
        stream = self._err if is_error else self._out
        if stream is None:
            return
        encoding = stream.encoding or "utf-8"
        shown = line.encode(encoding, "replace").decode(encoding)
        try:
            with self._lock:
                print(f"{self._prefix}{shown}", file=stream, flush=True)
        except (OSError, ValueError) as error:  # such as the closed stream of a notebook
            self._lose(is_error, error)

    def _lose(self, is_error: bool, error: Exception) -> None:
        """Drops a stream that cannot be written, and says so on the other one."""
        name, other = ("Standard error", self._out) if is_error else ("Standard output", self._err)
        if is_error:
            self._err = None
        else:
            self._out = None
        if other is not None:
            with contextlib.suppress(OSError, ValueError):
                print(streams.lost(name, error), end="", file=other, flush=True)


def _verdict(lines: list[str]) -> str:
    """Returns the watchdog's verdict without the thread stacks that follow it."""
    ends = [i for i, line in enumerate(lines) if line.startswith("This process exits with code ")]
    if not ends:
        return ""
    begins = [i for i, line in enumerate(lines[: ends[-1]]) if line.startswith("error: ")]
    return "\n".join(lines[begins[-1] : ends[-1]]) if begins else ""


def main(command: Sequence[str]) -> int:
    """Runs a command with its rank under mpirun before each line; returns its exit code."""
    streams.guard()
    started = read_mpi(os.environ)
    relay = Relay(str(started.rank) if started else "", sys.stdout, sys.stderr)
    try:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,  # Hydra's processes use an inherited file descriptor
        )
    except OSError as error:
        print(f"error: {command[0]!r} cannot be started ({error.strerror}).", file=sys.stderr)
        return _NOT_FOUND
    with child:
        # The command receives an interrupt too, and decides when to exit.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda received, _: child.send_signal(received))
        relay.start(child)
        code = child.wait()
        relay.join(_DRAIN_SECONDS)
    return exit_code(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
