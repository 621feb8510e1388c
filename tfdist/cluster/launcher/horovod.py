"""Environment variables and a rendezvous server for Horovod's Gloo controller.

Sets the same variables as `horovod.runner.gloo_run`, but does not start processes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from tfdist.cluster.networks import listen_address


@dataclass(frozen=True)
class Slot:
    """The position of a worker, named as in MPI and Horovod: `cross` counts hosts."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def installed() -> bool:
    """Returns whether Horovod is installed, without importing it."""
    return find_spec("horovod") is not None


def environ(slot: Slot, server: str, port: int, interface: str) -> dict[str, str]:
    """Returns the environment variables of one worker.

    Args:
        slot: The slot of the worker.
        server: Address of the host that runs the rendezvous server.
        port: Port of that server.
        interface: The network interface between the workers; empty: Horovod chooses.
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


@contextlib.contextmanager
def rendezvous_server(slots: Sequence[Slot], port: int) -> Iterator[None]:
    """Runs Horovod's rendezvous server within the block, in a thread.

    The server has no authentication. If all workers are on one host, it therefore listens on the
    loopback address only.
    """
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http import http_server

    server = http_server.RendezvousHTTPServer(
        (listen_address([slot.host for slot in slots]), port), http_server.RendezvousHandler, False
    )
    server.init([SlotInfo(**_slot_info(slot)) for slot in slots])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _slot_info(slot: Slot) -> dict[str, int | str]:
    fields = asdict(slot)
    return {"hostname": fields.pop("host"), **fields}
