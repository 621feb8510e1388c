"""Whether the other processes exist and respond.

A stopped process still accepts connections, but does not answer. Horovod's Gloo gives up by
aborting the process, in C++, without naming the missing rank; so before Gloo starts, each rank
registers at Horovod's rendezvous server, which stores any key.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tfdist.cluster.networks import listen_address
from tfdist.cluster.record import split
from tfdist.errors import ClusterError

#: The beginning of an HTTP/2 connection (RFC 9113, 3.4): preface and empty settings. A gRPC server
#: answers with its own; ours answers anything.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_MAX_THREADS = 512


def silent(addresses: Mapping[int, str], seconds: float = 5.0) -> list[int]:
    """Returns the ranks that do not answer, in O(n) connections for n addresses.

    Args:
        addresses: `"host:port"` of each rank: a gRPC server, or the port of `answering`.
        seconds: Time limit for each answer.
    """
    if not addresses:
        return []
    with ThreadPoolExecutor(min(len(addresses), _MAX_THREADS)) as pool:
        answers = list(pool.map(_answers, addresses.values(), [seconds] * len(addresses)))
    return [rank for rank, answered in zip(addresses, answers, strict=True) if not answered]


def answering() -> int:
    """Answers every connection while this process lives; returns the port."""
    # Under a launcher of one host the other ranks reach this one at the loopback address.
    host = listen_address([os.environ.get("HOROVOD_HOSTNAME", "localhost")])
    server = socketserver.ThreadingTCPServer((host, 0), _Answer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True, name="liveness").start()
    return server.server_address[1]


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.sendall(b"alive")


def _answers(address: str, seconds: float) -> bool:
    try:
        with socket.create_connection(split(address), timeout=seconds) as connection:
            connection.sendall(_HELLO)
            return bool(connection.recv(1))
    except OSError:
        return False


#: How long a rank waits for the others to register.
SECONDS = 120.0
_RETRY_SECONDS = 0.1
#: Requests per second of all ranks together while they wait for rank 0's list.
_REQUESTS_PER_SECOND = 200
#: Time by which the others wait longer than rank 0, whose list names the missing ranks.
_EXTRA_SECONDS = 10.0
_SCOPE = "tfdist-roll-call"
#: The key of the list of all addresses.
_ALL = "all"


def roll_call(rank: int, size: int, seconds: float = SECONDS) -> dict[int, str]:
    """Returns the addresses of the other ranks' `answering`, when all ranks have called this.

    Returns nothing, at once, if no rendezvous server is set. Each rank registers its address; rank
    0 reads all of them and registers the list, which the others read. So the server receives O(n)
    requests from n ranks, and rank 0 sends O(n).

    Args:
        rank: Rank of this process.
        size: Number of processes.
        seconds: Longest time to wait.

    Raises:
        ClusterError: Ranks are missing after that time, or the server is.
    """
    if size == 1 or "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ:
        return {}
    deadline = time.monotonic() + seconds
    own = f"{os.environ.get('HOROVOD_HOSTNAME', 'localhost')}:{answering()}"
    _register(str(rank), own)
    found = _collect(size, deadline) if rank == 0 else _wait_for_list(size, deadline)
    missing = [other for other in range(size) if str(other) not in found] if found else [0]
    if missing:
        named = " and ".join(f"rank {other}" for other in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ClusterError(
            f"Rank {rank} of {size} waited {seconds:.0f} s in start-up for {named}{more}: check "
            "whether that process failed, and whether its host reaches the launcher's."
        )
    return {int(other): address for other, address in found.items() if int(other) != rank}


def _collect(size: int, deadline: float) -> dict[str, str]:
    """Registers, on rank 0, the addresses of the ranks that come in time, and returns them."""
    found: dict[str, str] = {}
    for rank in map(str, range(size)):  # one after the other, so that each is read about once
        while not (address := _registered(rank)) and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
        if address:
            found[rank] = address
    _register(_ALL, json.dumps(found))
    return found


def _wait_for_list(size: int, deadline: float) -> dict[str, str]:
    """Returns what rank 0 has collected; nothing if it does not come."""
    interval = max(_RETRY_SECONDS, size / _REQUESTS_PER_SECOND)
    while not (text := _registered(_ALL)) and time.monotonic() < deadline + _EXTRA_SECONDS:
        time.sleep(interval * random.uniform(0.5, 1.0))  # so that not all ask at the same moment
    found: dict[str, str] = json.loads(text) if text else {}
    return found


def _server() -> tuple[str, str]:
    prefix = "HOROVOD_GLOO_RENDEZVOUS_"
    return os.environ[f"{prefix}ADDR"], os.environ[f"{prefix}PORT"]


def _register(key: str, value: str) -> None:
    from horovod.runner.http.http_client import put_data_into_kvstore

    try:
        put_data_into_kvstore(*_server(), _SCOPE, key, value)
    except RuntimeError as error:
        raise ClusterError(
            f"This rank cannot reach the launcher's server at {':'.join(_server())}: check "
            "whether the launcher is running, and whether this host reaches that address."
        ) from error


def _registered(key: str) -> str:
    """Returns what was registered under a key; empty if nothing was yet."""
    from horovod.runner.http.http_client import read_data_from_kvstore

    try:
        return read_data_from_kvstore(*_server(), _SCOPE, key)
    except RuntimeError:
        return ""
