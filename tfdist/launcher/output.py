"""The workers' output: relayed line by line, each line with its worker's name.

`python -m tfdist.launcher.output COMMAND ...` runs a command that mpirun starts, with its rank
before each line. mpirun has a flag for that, but Open MPI puts the name before each piece of a
line, and every MPI writes it in another form.
"""

from __future__ import annotations

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

_TRACEBACK = "Traceback (most recent call last):"
_KEPT_LINES = 400
_DRAIN_SECONDS = 1.0
#: Exit code of shells for a program that does not exist.
_NOT_FOUND = 127

#: What TensorFlow's libraries write while they load, at any log level: notes on missing drivers.
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

    #: Held while one line is written, by any relay.
    _lock = threading.Lock()

    def __init__(self, name: str, out: TextIO | None, err: TextIO | None) -> None:
        self._prefix = f"[{name}] " if name else ""
        self._out, self._err = out, err
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self._threads: list[threading.Thread] = []

    def start(self, child: subprocess.Popen[bytes]) -> None:
        """Reads the pipes of a process until they end."""
        for pipe, is_error in ((child.stdout, False), (child.stderr, True)):
            thread = threading.Thread(target=self._relay, args=(pipe, is_error), daemon=True)
            thread.start()
            self._threads.append(thread)

    def write(self, text: str, is_error: bool) -> None:
        """Relays complete lines that another process has read."""
        for line in text.splitlines():
            self._show(line, is_error)

    def join(self, seconds: float) -> None:
        """Waits for the rest of the output; a grandchild may hold a pipe open."""
        for thread in self._threads:
            thread.join(seconds)

    def last_words(self) -> str:
        """Returns the watchdog's verdict, else the last traceback, else the last error lines."""
        lines = list(self._errors)
        if verdict := _verdict(lines):
            return verdict
        begins = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
        if not begins:
            return "\n".join(lines[-10:])
        tag = lines[begins[-1]].removesuffix(_TRACEBACK)  # of a rank, where mpirun is the process
        return "\n".join(line for line in lines[begins[-1] :] if line.startswith(tag))

    def _relay(self, pipe: IO[bytes], is_error: bool) -> None:
        # Everything is read to its end: a process whose pipe is full would block.
        for raw in pipe:
            # A progress bar rewrites its line after a carriage return: only its last state counts.
            line = raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
            if is_error:
                if _NOISE.match(line):
                    continue
                self._errors.append(line)
            self._show(line, is_error)

    def _show(self, line: str, is_error: bool) -> None:
        to = self._err if is_error else self._out
        if to is None:
            return
        encoding = to.encoding or "utf-8"
        shown = line.encode(encoding, "replace").decode(encoding)
        try:
            with self._lock:
                print(f"{self._prefix}{shown}", file=to, flush=True)
        except BrokenPipeError:  # as in `... | head`: the reader is gone, so the run ends
            if is_error:
                self._err = None
            else:
                self._out = None
            os.kill(os.getpid(), signal.SIGTERM)


def _verdict(lines: list[str]) -> str:
    """Returns the watchdog's verdict, which is followed by the stacks of all threads."""
    ends = [i for i, line in enumerate(lines) if line.startswith("This process ends with code ")]
    if not ends:
        return ""
    begins = [i for i, line in enumerate(lines[: ends[-1]]) if line.startswith("error: ")]
    return "\n".join(lines[begins[-1] : ends[-1]]) if begins else ""


def main(command: Sequence[str]) -> int:
    """Runs a command with its rank under mpirun before each line; returns its exit code."""
    found = read_mpi(os.environ)
    relay = Relay(str(found.rank) if found else "", sys.stdout, sys.stderr)
    try:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,  # Hydra's processes talk to it through a file that it left open
        )
    except OSError as error:
        print(f"error: {command[0]!r} cannot be started ({error.strerror}).", file=sys.stderr)
        return _NOT_FOUND
    with child:
        # An interrupt reaches the command as well, which decides when to end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda received, _: child.send_signal(received))
        relay.start(child)
        code = child.wait()
        relay.join(_DRAIN_SECONDS)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
