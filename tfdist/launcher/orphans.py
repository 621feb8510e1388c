"""Ends what is left of a run when its launcher is gone, however that ended.

The launcher starts this file as a process of its own and holds the other end of its standard input,
which closes with the launcher: also after a SIGKILL, which no launcher can catch. Every process of
the run inherits the mark, wherever it moved to, so it is found among all processes. (The kernel's
own means, PR_SET_PDEATHSIG, reaches children only, not theirs.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil

#: The variable that holds the mark; several with commas, where a launcher started a launcher.
MARK = "TFDIST_LAUNCH"


@contextlib.contextmanager
def watching(mark: str) -> Iterator[None]:
    """Has every process with the mark ended when the block ends, or this process does."""
    with subprocess.Popen(
        # As a file, and without its folder on the path: tfdist need not be installed.
        [sys.executable, "-P", __file__, mark],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a terminal's signals are not for it
    ):
        yield


def marked(mark: str) -> dict[str, str]:
    """Returns the variable that puts the mark on a process, beside those this process has."""
    return {MARK: ",".join(filter(None, [os.environ.get(MARK), mark]))}


def sweep(mark: str) -> None:
    """Kills all processes with the mark; again, until none started another meanwhile."""
    while found := [process for process in psutil.process_iter() if _is_marked(process, mark)]:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, timeout=5)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        marks = process.environ().get(MARK, "").split(",")
        return mark in marks and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it has ended, or is another user's
        return False


if __name__ == "__main__":
    sys.stdin.read()
    sweep(sys.argv[1])
