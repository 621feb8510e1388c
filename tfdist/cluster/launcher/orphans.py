"""Kills the remaining processes of a run when its launcher has ended for any reason.

The launcher runs this file as a process, with a pipe to its standard input. The pipe closes when
the launcher ends, even if it was killed by SIGKILL. All processes of the run inherit a mark in
their environment, by which this process finds them. (PR_SET_PDEATHSIG of the kernel works only for
direct children.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil

#: The variable with the mark; several marks are separated by commas, for nested launchers.
MARK = "TFDIST_LAUNCH"


@contextlib.contextmanager
def watching(mark: str, *folders: str) -> Iterator[None]:
    """When the block or this process ends, kills processes with the mark, and removes folders."""
    with subprocess.Popen(
        # Run as a file without its folder on the path, because tfdist may not be installed.
        [sys.executable, "-P", __file__, mark, *folders],
        stdin=subprocess.PIPE,
        start_new_session=True,  # not affected by signals from the terminal
    ):
        yield


def marked(mark: str) -> dict[str, str]:
    """Returns the environment variable with this process's marks and a new one."""
    return {MARK: ",".join(filter(None, [os.environ.get(MARK), mark]))}


def kill_marked(mark: str) -> None:
    """Kills all processes with the mark. Repeats until there are none, as they may start others."""
    while processes := [process for process in psutil.process_iter() if _is_marked(process, mark)]:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=5)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        marks = process.environ().get(MARK, "").split(",")
        return mark in marks and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # the process has ended, or belongs to another user
        return False


if __name__ == "__main__":
    sys.stdin.read()
    kill_marked(sys.argv[1])
    for folder in sys.argv[2:]:
        shutil.rmtree(folder, ignore_errors=True)
