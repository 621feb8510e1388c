"""Whether a process lives: one that is stopped still takes connections, but does not answer."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from tfdist.cluster.record import split

#: What begins a connection of HTTP/2 (RFC 9113, 3.4): its preface and empty settings. A server of
#: gRPC answers with its own; ours answers anything.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def silent(addresses: Mapping[int, str], seconds: float = 5.0) -> list[int]:
    """Returns the ranks that do not answer.

    Args:
        addresses: `"host:port"` of each rank asked: a server of gRPC, or what `answering` gives.
        seconds: That each of them has to answer.
    """
    if not addresses:
        return []
    with ThreadPoolExecutor(len(addresses)) as pool:
        answers = list(pool.map(_answers, addresses.values(), [seconds] * len(addresses)))
    return [rank for rank, answered in zip(addresses, answers, strict=True) if not answered]


def answering() -> int:
    """Answers whoever connects, for as long as this process lives, and returns the port."""
    server = socketserver.ThreadingTCPServer(("", 0), _Answer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True, name="signs-of-life").start()
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
