"""The thread that beats: it lives from the first call of the trainer to the end of the process."""

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
from tfdist.watchdog.exit import end
from tfdist.watchdog.monitor import Hub
from tfdist.watchdog.reporter import Guest
from tfdist.watchdog.status import Pulse
from tfdist.watchdog.verdict import Row

_TELL_SECONDS = 1.0


class Beats:
    """Joins the watchdogs of all workers; made by all of them at the same place.

    Args:
        rank: Of this worker.
        size: Number of workers.
        share: Gives the text of rank 0 to all.
        hosts: Where the others may find this host.

    Attributes:
        pulse: What this worker tells of itself.
    """

    def __init__(
        self, rank: int, size: int, share: Callable[[str], str], hosts: Sequence[str]
    ) -> None:
        self.pulse = Pulse(rank)
        self._node: Hub | Guest
        if rank == 0:
            listener, token = _listener(), secrets.token_hex(8)
            share(" ".join([token, str(listener.getsockname()[1]), *hosts]))
            self._node = Hub(self.pulse, size, listener, token, self._obey)
        else:
            token, port, *places = share("").split()
            self._node = Guest(self.pulse, places, int(port), token, self._obey)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._beat, name="watchdog", daemon=True).start()
        atexit.register(self._leave)

    def tell(self) -> None:
        """Tells the others now; what is said last must have left before the process may end."""
        telling = asyncio.run_coroutine_threadsafe(self._node.tell(), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            telling.result(_TELL_SECONDS)

    def rows(self) -> list[Row]:
        """Returns what is known of each worker now, by rank."""
        return self._node.rows()

    def _beat(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._node.run())
        self._loop.run_forever()

    def _leave(self) -> None:
        self.pulse.end()
        self.tell()

    def _obey(self, reason: str) -> None:
        if self.pulse.at_work:
            end(reason)


def _listener() -> socket.socket:
    """A socket at a free port of all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def own_hosts(cluster: Cluster) -> list[str]:
    """Returns where others may find this host: the name that they know, or any address of it."""
    named = [split(cluster.addresses[0])[0]] if cluster.addresses else []
    return [*named, *(address for address, _ in this_host().interfaces), "127.0.0.1"]
