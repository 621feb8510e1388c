"""What Horovod's Gloo controller needs from a launcher: variables, and a rendezvous server.

As `horovod.runner.gloo_run` sets them, without its own way of starting and ending processes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec

from tfdist.errors import LaunchError
from tfdist.launcher.plan import Slot


def installed() -> bool:
    """Tells whether Horovod is there, without importing it."""
    return find_spec("horovod") is not None


def environ(slot: Slot, server: str, port: int, interface: str) -> dict[str, str]:
    """Returns the variables of one worker.

    Args:
        slot: Its place.
        server: Address of the host that runs `serving`.
        port: Where that listens.
        interface: The network interface by which this worker reaches the others; empty: left to
            Horovod.
    """
    return {
        "HOROVOD_HOSTNAME": slot.host,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
    }


def check_host_name() -> None:
    """Makes sure that Gloo tells other hosts an address of this one that they reach.

    Horovod 0.28.1 hands the interface it is given to its first connections only; those of its sets
    of processes (`GlooContext::InitializeForProcessSet`) look the host's own name up.

    Raises:
        LaunchError: The name is that of the loopback.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "nothing"
    if address == "nothing" or address.startswith("127."):
        raise LaunchError(
            f"This host's name {name!r} stands for {address}, which Horovod's Gloo would tell the "
            "other hosts: give it the host's address in /etc/hosts, or use --via mpirun."
        )


@contextlib.contextmanager
def serving(slots: Sequence[Slot], port: int) -> Iterator[None]:
    """Runs Horovod's rendezvous server within the block, in a thread."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http import http_server

    server = http_server.RendezvousHTTPServer(("", port), http_server.RendezvousHandler, False)
    server.init([SlotInfo(**_named_as_horovod_does(slot)) for slot in slots])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _named_as_horovod_does(slot: Slot) -> dict[str, int | str]:
    fields = asdict(slot)
    return {"hostname": fields.pop("host"), **fields}
