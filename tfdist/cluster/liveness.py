"""Checks whether the other processes exist and respond.

A suspended process still accepts connections, but does not respond. If a rank is missing, Horovod's
Gloo aborts the process in C++ without naming that rank. Therefore each rank registers at Horovod's
rendezvous server, which is a key-value store, before Gloo starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socketserver
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tfdist.cluster.networks import bypass_proxy, listen_address
from tfdist.cluster.record import joined
from tfdist.cluster.remote import probe
from tfdist.console import threads
from tfdist.errors import ClusterError

_MAX_THREADS = 512
#: Not Python's global generator, whose draws the user's seed determines.
_random = random.SystemRandom()


def silent(addresses: Mapping[int, str], seconds: float = 5.0) -> list[int]:
    """Returns the ranks that do not respond, with O(n) connections for n addresses.

    Args:
        addresses: `"host:port"` of each rank: of a gRPC server or of `start_responder`.
        seconds: Time limit for each response.
    """
    if not addresses:
        return []
    with ThreadPoolExecutor(min(len(addresses), _MAX_THREADS)) as pool:
        answers = list(pool.map(_answers, addresses.values(), [seconds] * len(addresses)))
    return [rank for rank, answered in zip(addresses, answers, strict=True) if not answered]


def start_responder() -> int:
    """Starts a server that replies to every connection, and returns its port."""
    # If all ranks are on one host, they use the loopback address.
    host = listen_address([os.environ.get("HOROVOD_HOSTNAME", "localhost")])
    server = socketserver.ThreadingTCPServer((host, 0), _Answer)
    server.daemon_threads = True
    threads.start(server.serve_forever, name="liveness")
    return server.server_address[1]


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            self.request.sendall(b"alive")


def _answers(address: str, seconds: float) -> bool:
    try:
        return probe.answers(address, seconds)  # the server of `start_responder` answers anything
    except ConnectionError:
        return False


#: Time limit for all ranks to register.
SECONDS = 120.0
_RETRY_SECONDS = 0.1
#: Total requests per second of all ranks while they wait for rank 0's list.
_REQUESTS_PER_SECOND = 200
#: Additional waiting time of other ranks, to receive rank 0's list of the registered ranks.
_EXTRA_SECONDS = 10.0
_SCOPE = "tfdist-roll-call"
#: The key under which rank 0 stores the list of all addresses.
_ALL = "all"


def roll_call(rank: int, size: int, seconds: float = SECONDS) -> dict[int, str]:
    """Waits until all ranks have called this, and returns the responder addresses of the others.

    Returns an empty mapping immediately if no rendezvous server is set. Each rank registers its
    address. Rank 0 reads all of them and registers the list, which the others read. Thus n ranks
    send O(n) requests to the server, O(n) of them by rank 0.

    Raises:
        ClusterError: Ranks are missing after that time, or the server cannot be reached.
    """
    if size == 1 or "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ:
        return {}
    deadline = time.monotonic() + seconds
    bypass_proxy([":".join(_server())])
    address = joined(os.environ.get("HOROVOD_HOSTNAME", "localhost"), start_responder())
    _register(str(rank), address)
    addresses: dict[str, str] = {}
    if rank == 0:
        for other in map(str, range(size)):  # sequentially, so that each is read about once
            while not (registered := _registered(other)) and time.monotonic() < deadline:
                time.sleep(_RETRY_SECONDS)
            if registered:
                addresses[other] = registered
        _register(_ALL, json.dumps(addresses))
    else:
        interval = max(_RETRY_SECONDS, size / _REQUESTS_PER_SECOND)
        while not (text := _registered(_ALL)) and time.monotonic() < deadline + _EXTRA_SECONDS:
            time.sleep(interval * _random.uniform(0.5, 1.0))  # spread the requests of the ranks
        addresses = json.loads(text) if text else {}
    missing = [n for n in range(size) if str(n) not in addresses] if addresses else [0]
    if missing:
        ranks = " and ".join(f"rank {other}" for other in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ClusterError(
            f"Rank {rank} of {size} waited {seconds:.0f} s in start-up for {ranks}{more}. Check "
            "whether that process failed, and whether its host can connect to the launcher's host."
        )
    return {int(other): address for other, address in addresses.items() if int(other) != rank}


def _server() -> tuple[str, str]:
    prefix = "HOROVOD_GLOO_RENDEZVOUS_"
    return os.environ[f"{prefix}ADDR"], os.environ[f"{prefix}PORT"]


def _register(key: str, value: str) -> None:
    from horovod.runner.http.http_client import put_data_into_kvstore

    try:
        put_data_into_kvstore(*_server(), _SCOPE, key, value)
    except RuntimeError as error:
        raise ClusterError(
            f"Cannot connect to the launcher's server at {':'.join(_server())}. Check "
            "whether the launcher is running, and whether this host can reach that address."
        ) from error


def _registered(key: str) -> str:
    from horovod.runner.http.http_client import read_data_from_kvstore

    try:
        return read_data_from_kvstore(*_server(), _SCOPE, key)
    except RuntimeError:
        return ""
