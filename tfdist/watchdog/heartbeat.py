"""The thread of the watchdog: from the first trainer to the end of the process."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Sequence

from tfdist.cluster.messages import job_key
from tfdist.cluster.networks import listen_address, this_host
from tfdist.cluster.record import Cluster, split
from tfdist.watchdog.batching import event_loop
from tfdist.watchdog.deadline import exit_now
from tfdist.watchdog.protocol import Coordinator, Reporter
from tfdist.watchdog.status import Report, State, Status

_SEND_SECONDS = 1.0
_LOOPBACK = "127.0.0.1"


class Heartbeat:
    """Connects the watchdogs of all workers, which create it at the same point of the program.

    Args:
        rank: Rank of this worker.
        size: Number of workers.
        broadcast: Returns the text of rank 0 on all workers.
        hosts: Addresses of this host for the others.
        on_gpus: Whether this worker computes on GPUs, whose kernels may take long to compile.
        listen_at: Where rank 0 listens; empty: on all interfaces.

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
        listen_at: str = "",
    ) -> None:
        self.status = Status(rank, on_gpus, size)
        self._node: Coordinator | Reporter
        if rank == 0:
            listener, token = _listener(listen_at), secrets.token_hex(16)
            broadcast(" ".join([token, str(listener.getsockname()[1]), *hosts]))
            key = _key(token)
            self._node = Coordinator(self.status, size, listener, key, self._on_verdict)
        else:
            token, port, *places = broadcast("").split()
            key = _key(token)
            self._node = Reporter(self.status, size, places, int(port), key, self._on_verdict)
        self._loop = event_loop(size)
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        atexit.register(self._leave)

    def send(self, at_once: bool = False) -> None:
        """Sends this worker's report now.

        Args:
            at_once: Whether it must leave before the process may end; otherwise large jobs wait for
                the next regular report.
        """
        sending = asyncio.run_coroutine_threadsafe(self._node.send(at_once), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            sending.result(_SEND_SECONDS)

    def reports(self) -> list[Report]:
        """Returns what is known: on rank 0 of each worker, elsewhere of rank 0 and this worker."""
        return self._node.reports()

    def may_explain_error(self) -> bool:
        """Tells whether an error of this worker may come from another one's end."""
        return self._node.may_explain_error()

    def leave(self, state: State, error: str = "") -> None:
        """Ends a call of the trainer, and reports it."""
        self.status.leave(state, error)
        self.send(at_once=state is not State.OUTSIDE)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._node.run())
        self._loop.run_forever()

    def _leave(self) -> None:
        self.status.end()
        self.send(at_once=True)

    def _on_verdict(self, reason: str) -> None:
        if self.status.at_work:
            exit_now(reason)


def _key(token: str) -> bytes:
    """Returns the key of this run: the job's secret, and what rank 0 has broadcast."""
    return job_key() + b" " + token.encode()


def _listener(host: str) -> socket.socket:
    """Returns a socket at a free port."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def own_hosts(cluster: Cluster) -> tuple[list[str], str]:
    """Returns the addresses of this host for the other workers, and where it should listen.

    With all workers on this host that is the loopback address; elsewhere the address that the
    others know, if it is one of this host, or all interfaces.
    """
    if cluster.local_size == cluster.size:
        return [_LOOPBACK], _LOOPBACK
    named = [split(address)[0] for address in cluster.addresses]
    hosts = [*named[:1], *(address for address, _ in this_host().interfaces), _LOOPBACK]
    listen_at = listen_address(named) if named else ""
    return hosts, listen_at
