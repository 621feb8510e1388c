"""The workers' lines on this terminal, each with its worker's name, and what one said last."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections import deque
from typing import IO, TextIO

_TRACEBACK = "Traceback (most recent call last):"
_KEPT_LINES = 400

#: What TensorFlow's libraries write while they load, whatever the level: notes on drivers that are
#: not there. mpirun and horovodrun may put a rank before it.
_START = re.compile(
    r"^(\[[\d,]+\](<\w+>:)? ?)?(WARNING: All log messages before absl::InitializeLog\(\) is called "
    r"|I0000 00:00:[\d.]+ +\d+ \w+\.cc:)"
)


class Relay:
    """Passes on what one process writes, in threads, line by line.

    Args:
        name: Put in brackets before each line; empty: nothing is.
        out: Where standard output goes; None: nowhere.
        err: Where standard error goes; None: nowhere.
    """

    #: One line at a time, whoever writes it.
    _turn = threading.Lock()

    def __init__(self, name: str, out: TextIO | None, err: TextIO | None) -> None:
        self._prefix = f"[{name}] " if name else ""
        self._out, self._err = out, err
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self._threads: list[threading.Thread] = []

    def start(self, child: subprocess.Popen[bytes]) -> None:
        """Reads the pipes of a process until they end."""
        for pipe, to, kept in (
            (child.stdout, self._out, None),
            (child.stderr, self._err, self._errors),
        ):
            thread = threading.Thread(target=self._pass_on, args=(pipe, to, kept), daemon=True)
            thread.start()
            self._threads.append(thread)

    def join(self, seconds: float) -> None:
        """Waits for the rest of the output; a pipe stays open while a child of a child has it."""
        for thread in self._threads:
            thread.join(seconds)

    def last_words(self) -> str:
        """Returns the last traceback that came, or else the last lines on standard error."""
        lines = list(self._errors)
        if verdict := _verdict(lines):
            return verdict
        begins = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
        if not begins:
            return "\n".join(lines[-10:])
        tag = lines[begins[-1]].removesuffix(_TRACEBACK)  # of a rank, where mpirun is the process
        return "\n".join(line for line in lines[begins[-1] :] if line.startswith(tag))

    def _pass_on(self, pipe: IO[bytes], to: TextIO | None, kept: deque[str] | None) -> None:
        # Whatever comes is read to its end: a process whose pipe is full stands still.
        for raw in pipe:
            # A progress line rewrites itself after a carriage return: its last state counts.
            line = raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
            if kept is not None:
                if _START.match(line):
                    continue
                kept.append(line)
            if to is None:
                continue
            encoding = to.encoding or "utf-8"
            shown = line.encode(encoding, "replace").decode(encoding)
            try:
                with self._turn:
                    print(f"{self._prefix}{shown}", file=to, flush=True)
            except BrokenPipeError:  # as in `... | head`: nobody wants more, so the run is over
                to = None
                os.kill(os.getpid(), signal.SIGTERM)


def _verdict(lines: list[str]) -> str:
    """What the watchdog said of who keeps others waiting; below it are the stacks of threads."""
    ends = [i for i, line in enumerate(lines) if line.startswith("This process ends with code ")]
    if not ends:
        return ""
    begins = [i for i, line in enumerate(lines[: ends[-1]]) if line.startswith("error: ")]
    return "\n".join(lines[begins[-1] : ends[-1]]) if begins else ""
