"""Finds device servers that no longer answer, in a process of its own.

TensorFlow's own check of a server waits for ever if the server is stopped, and blocks all threads
of Python meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from tfdist.cluster.record import split
from tfdist.cluster.remote import probe
from tfdist.cluster.remote.probe import Lost, problem
from tfdist.console import threads
from tfdist.errors import ClusterError

#: Time in which servers that are started together with the training have to listen.
START_SECONDS = 60.0


def wait_for(servers: Sequence[str], seconds: float = START_SECONDS) -> None:
    """Waits until servers answer.

    Raises:
        ClusterError: One of them does not in time.
    """
    deadline = time.monotonic() + seconds
    missing = [server for server in servers if split(server)]
    while missing := [server for server in missing if problem(server)]:
        if time.monotonic() > deadline:
            names = ", ".join(missing)
            raise ClusterError(
                f"No device server answers at {names} after {seconds:.0f} s: start "
                "tfdist remote PORT on each of these hosts, and open the port for this "
                "host."
            )
        time.sleep(0.2)


def first_lost(servers: Sequence[str]) -> Lost | None:
    """Asks each server once, and returns the first one that does not answer."""
    lost = (Lost(server, reason) for server in servers if (reason := problem(server)))
    return next(lost, None)


class Heartbeat:
    """Asks servers in a process of its own from now on, until this process ends.

    It ends this process with an exit code if a server is lost before `listen` is called, or while a
    call of TensorFlow that waits for the server blocks Python.

    Attributes:
        lost: The first server that is lost, or None.
        on_loss: Called once in a thread with that server.
    """

    def __init__(self, servers: Sequence[str], exit_code: int) -> None:
        self.lost: Lost | None = None
        self.on_loss: Callable[[Lost], object] = lambda lost: None
        queue = probe.native_exit(exit_code)
        self._process = subprocess.Popen(
            [sys.executable, "-m", probe.__name__, str(os.getpid()), str(queue or 0), *servers],
            pass_fds=[queue] if queue else [],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for the training, which may use servers to its end
        )
        atexit.register(self._process.terminate)  # TensorFlow may take a while to end

    def listen(self) -> None:
        """Leaves it to this process how to end, as long as its Python runs."""
        threads.start(self._listen, name="device servers")

    def _listen(self) -> None:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        if pipe_in is None or pipe_out is None:
            return
        server, tab, reason = pipe_out.readline().rstrip("\n").partition("\t")
        if not tab:  # the process has ended, for example with this one
            return
        self.lost = Lost(server, reason)
        with contextlib.suppress(OSError):
            print("acknowledged", file=pipe_in, flush=True)
        self.on_loss(self.lost)
