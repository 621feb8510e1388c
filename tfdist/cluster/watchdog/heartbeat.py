"""The watchdog's thread, which runs from the first trainer to the end of the process."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from selectors import SelectorKey

from tfdist.cluster.deadline import exit_now
from tfdist.cluster.messages import job_key
from tfdist.cluster.networks import listen_address, this_host
from tfdist.cluster.record import Cluster, split
from tfdist.cluster.watchdog.protocol import SMALL_JOB, Coordinator, Reporter
from tfdist.cluster.watchdog.status import Report, State, Status
from tfdist.console import threads

_SEND_SECONDS = 1.0
_LOOPBACK = "127.0.0.1"
#: Time during which messages of a larger job are collected. At the end of each trainer call,
#: sending the last report is delayed by this time.
_BATCH_SECONDS = 0.02


class Heartbeat:
    """Connects the watchdogs of all workers. All workers must create it at the same point.

    Args:
        rank: Rank of this worker.
        size: Number of workers.
        broadcast: Broadcasts the text of rank 0 to all workers.
        hosts: Addresses at which other workers reach this host.
        on_gpus: Whether this worker uses GPUs, whose kernels may take long to compile.
        listen_at: Address at which rank 0 listens; empty: all interfaces.
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
            token, port, *hosts_of_rank_0 = broadcast("").split()
            key = _key(token)
            self._node = Reporter(
                self.status, size, hosts_of_rank_0, int(port), key, self._on_verdict
            )
        self._loop = event_loop(size)
        threads.start(self._run, name="watchdog")
        atexit.register(self._leave)

    def send(self, at_once: bool = False) -> None:
        """Sends this worker's report now.

        Args:
            at_once: Whether to send it immediately; otherwise, large jobs wait for
                the next regular report.
        """
        sending = asyncio.run_coroutine_threadsafe(self._node.send(at_once), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            sending.result(_SEND_SECONDS)

    def reports(self) -> list[Report]:
        """Returns the latest reports: of all workers on rank 0, else of rank 0 and this one."""
        return self._node.reports()

    def may_explain_error(self) -> bool:
        """Returns whether the failure of another worker may have caused an error of this one."""
        return self._node.may_explain_error()

    def leave(self, state: State, error: str = "") -> None:
        """Records and reports the end of a trainer call."""
        self.status.leave(state, error)
        self.send(at_once=state is not State.OUTSIDE)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._node.run())
        self._loop.run_forever()  # sends the last reports

    def _leave(self) -> None:
        self.status.end()
        self.send(at_once=True)

    def _on_verdict(self, reason: str) -> None:
        if self.status.is_running:
            exit_now(reason)


def _key(token: str) -> bytes:
    """Returns the key of this run: the job's secret and the token that rank 0 has broadcast."""
    return job_key() + b" " + token.encode()


def _listener(host: str) -> socket.socket:
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def host_addresses(cluster: Cluster) -> tuple[list[str], str]:
    """Returns the addresses at which other workers reach this host, and the address to listen on.

    If all workers are on this host, it listens on the loopback address. Otherwise it listens on the
    address that the others know if this host has it, or else on all interfaces.
    """
    if cluster.local_size == cluster.size:
        return [_LOOPBACK], _LOOPBACK
    named = [split(address)[0] for address in cluster.addresses]
    hosts = [*named[:1], *(address for address, _ in this_host().interfaces), _LOOPBACK]
    listen_at = listen_address(named) if named else ""
    return hosts, listen_at


class _BatchingSelector(selectors.DefaultSelector):
    """Waits before it polls, to handle messages of many workers at once, with fewer wake-ups."""

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        delay = _BATCH_SECONDS if timeout is None else min(timeout, _BATCH_SECONDS)
        if delay > 0:
            time.sleep(delay)
        return super().select(None if timeout is None else max(0.0, timeout - delay))


def event_loop(size: int) -> asyncio.AbstractEventLoop:
    """Returns a new event loop for the watchdog of `size` workers."""
    if size <= SMALL_JOB:
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(_BatchingSelector())
