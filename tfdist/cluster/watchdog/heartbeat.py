"""The watchdog's thread, and the trainer's interface to it, which records calls and progress."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from selectors import SelectorKey
from typing import Any, Protocol

import tensorflow as tf

from tfdist import cluster
from tfdist.cluster.deadline import exit_now
from tfdist.cluster.messages import job_key
from tfdist.cluster.networks import listen_address, this_host
from tfdist.cluster.record import Cluster, split
from tfdist.cluster.watchdog.protocol import SMALL_JOB, Coordinator, Reporter
from tfdist.cluster.watchdog.status import Report, State, Status, missed_seconds
from tfdist.cluster.watchdog.verdict import GRACE_SECONDS, SILENCE_SECONDS
from tfdist.console import threads
from tfdist.errors import ConfigurationError, summary

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

    Attributes:
        status: The progress of this worker.
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
        """Returns the events; see `selectors.BaseSelector.select`."""
        delay = _BATCH_SECONDS if timeout is None else min(timeout, _BATCH_SECONDS)
        if delay > 0:
            time.sleep(delay)
        return super().select(None if timeout is None else max(0.0, timeout - delay))


def event_loop(size: int) -> asyncio.AbstractEventLoop:
    """Returns a new event loop for the watchdog of `size` workers."""
    if size <= SMALL_JOB:
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(_BatchingSelector())


_heartbeat: Heartbeat | None = None


class Workers(Protocol):
    """The part of a process group that the watchdog uses."""

    size: int
    rank: int

    def broadcast_object(self, value: Any) -> Any:
        """Returns the object of rank 0 on every worker."""


class Watchdog:
    """Terminates a run in which workers would wait forever. Does nothing with one worker.

    Args:
        workers: The trainer's process group; all workers create their watchdogs at the same point.
        seconds: Maximum time without progress of any worker; 0 turns the watchdog off. Workers that
            died or do not respond are detected sooner. Must be the same on every worker.

    Attributes:
        seconds: As passed; may be changed between two trainer calls.

    Raises:
        ConfigurationError: `seconds` is negative.
    """

    def __init__(self, workers: Workers, seconds: float) -> None:
        if seconds < 0:
            raise ConfigurationError(f"watchdog_seconds={seconds!r}: expected 0 or more.")
        self.seconds = seconds
        self._workers = workers
        self._watched = workers.size > 1 and seconds > 0
        if self._watched:  # not in `fit`, which a failing worker may never reach
            _start_heartbeat(workers)

    def passed(self, place: str) -> None:
        """Records a progress mark, cheaply. All workers pass the same marks in the same order."""
        if self._watched and _heartbeat:
            _heartbeat.status.passed(place)

    @contextmanager
    def watching(self, task: str) -> Iterator[None]:
        """Watches the block, which all workers enter. A nested block has no effect."""
        if not (self._watched and _heartbeat) or _heartbeat.status.is_running:
            yield
            return
        heartbeat = _heartbeat
        heartbeat.status.enter(task, self.seconds)
        heartbeat.send()  # so that a worker that dies right after this is known to be running
        left, error = State.OUTSIDE, ""
        try:
            yield
        except KeyboardInterrupt:
            left = State.INTERRUPTED
            raise
        except BaseException as raised:
            left, error = State.FAILED, summary(raised)
            if any(isinstance(e, tf.errors.OpError) for e in (raised, raised.__cause__)):
                _wait_for_an_explanation(heartbeat, missed_seconds(self._workers.size))
            raise
        finally:
            heartbeat.leave(left, error)


def _start_heartbeat(workers: Workers) -> None:
    """Starts the heartbeat of this process, once. All workers must call it together."""
    global _heartbeat
    if _heartbeat is None:
        hosts, listen_at = host_addresses(cluster.current())
        on_gpus = bool(tf.config.get_visible_devices("GPU"))
        _heartbeat = Heartbeat(
            workers.rank, workers.size, workers.broadcast_object, hosts, on_gpus, listen_at
        )


def _wait_for_an_explanation(heartbeat: Heartbeat, news_seconds: float) -> None:
    """Waits while the failure of another worker may explain an error of this one.

    If it does, a verdict arrives and terminates this process.

    Args:
        heartbeat: Heartbeat of this process.
        news_seconds: Time until rank 0's replies show the failure of another worker.
    """
    began = time.monotonic()
    while (waited := time.monotonic() - began) < SILENCE_SECONDS + GRACE_SECONDS:
        if waited > news_seconds and not heartbeat.may_explain_error():
            return
        time.sleep(0.1)
