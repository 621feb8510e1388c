"""The thread that reports: from the first call of the trainer to the end of the process."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Sequence

from tfdist.cluster.networks import this_host
from tfdist.cluster.record import Cluster, split
from tfdist.watchdog.exit import exit_now
from tfdist.watchdog.monitor import Monitor
from tfdist.watchdog.report import Report
from tfdist.watchdog.reporter import Reporter
from tfdist.watchdog.status import Status

_SEND_SECONDS = 1.0


class Heartbeat:
    """Joins the watchdogs of all workers; made by all of them at the same place.

    Args:
        rank: Of this worker.
        size: Number of workers.
        broadcast: Gives the text of rank 0 to all.
        hosts: Where the others may find this host.
        on_gpus: Whether this worker computes on GPUs, whose kernels may take long to compile.

    Attributes:
        status: How far this worker is.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        broadcast: Callable[[str], str],
        hosts: Sequence[str],
        on_gpus: bool = False,
    ) -> None:
        self.status = Status(rank, on_gpus)
        self._node: Monitor | Reporter
        if rank == 0:
            listener, token = _listener(), secrets.token_hex(8)
            broadcast(" ".join([token, str(listener.getsockname()[1]), *hosts]))
            self._node = Monitor(self.status, size, listener, token, self._on_verdict)
        else:
            token, port, *places = broadcast("").split()
            self._node = Reporter(self.status, places, int(port), token, self._on_verdict)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        atexit.register(self._leave)

    def send(self) -> None:
        """Tells the others now; what is said last must have left before the process may end."""
        sending = asyncio.run_coroutine_threadsafe(self._node.send(), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            sending.result(_SEND_SECONDS)

    def reports(self) -> list[Report]:
        """Returns what is known of each worker now, by rank."""
        return self._node.reports()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._node.run())
        self._loop.run_forever()

    def _leave(self) -> None:
        self.status.end()
        self.send()

    def _on_verdict(self, reason: str) -> None:
        if self.status.at_work:
            exit_now(reason)


def _listener() -> socket.socket:
    """A socket at a free port of all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def own_hosts(cluster: Cluster) -> list[str]:
    """Returns where others may find this host: the name that they know, or any address of it."""
    named = [split(cluster.addresses[0])[0]] if cluster.addresses else []
    return [*named, *(address for address, _ in this_host().interfaces), "127.0.0.1"]
