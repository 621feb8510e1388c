"""Kills what is left of a run when its launcher is gone, however that ended.

The launcher runs this file as a process and holds the other end of its standard input, which closes
with the launcher: also after a SIGKILL, which no launcher can catch. Every process of the run
inherits a mark in its environment, so all of them are found, wherever they moved to. (The kernel's
PR_SET_PDEATHSIG reaches direct children only.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil

#: The variable with the mark; several marks are separated by commas, for nested launchers.
MARK = "TFDIST_LAUNCH"


@contextlib.contextmanager
def watching(mark: str) -> Iterator[None]:
    """Kills every process with the mark when the block or this process ends."""
    with subprocess.Popen(
        # As a file, and without its folder on the path: tfdist need not be installed.
        [sys.executable, "-P", __file__, mark],
        stdin=subprocess.PIPE,
        start_new_session=True,  # so that the terminal's signals do not reach it
    ):
        yield


def marked(mark: str) -> dict[str, str]:
    """Returns the variable that adds the mark to those of this process."""
    return {MARK: ",".join(filter(None, [os.environ.get(MARK), mark]))}


def sweep(mark: str) -> None:
    """Kills all processes with the mark, until none has started another one meanwhile."""
    while found := [process for process in psutil.process_iter() if _is_marked(process, mark)]:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, timeout=5)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        marks = process.environ().get(MARK, "").split(",")
        return mark in marks and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it has ended, or belongs to another user
        return False


if __name__ == "__main__":
    sys.stdin.read()
    sweep(sys.argv[1])
