"""Checks the address of a Ray cluster, because Ray itself tries to connect for minutes."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

#: Where `ray start` writes the address of its cluster, for processes without `RAY_ADDRESS`.
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
_SECONDS = 10.0


def check_reachable() -> None:
    """Checks that something listens where `ray.init()` connects to, if that is `HOST:PORT`.

    Raises:
        ConnectionError: Nothing answers there.
    """
    address, advice = os.environ.get("RAY_ADDRESS", ""), ""
    if address in ("", "auto"):
        with contextlib.suppress(OSError):
            address = _CURRENT_CLUSTER.read_text().strip()
            advice = f", which {_CURRENT_CLUSTER} names; RAY_ADDRESS=local starts a new cluster"
    host_and_port = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address)
    if host_and_port is None:
        return
    try:
        socket.create_connection((host_and_port[1], int(host_and_port[2])), _SECONDS).close()
    except (OSError, OverflowError) as error:  # OverflowError: no such port
        raise ConnectionError(f"no answer from {address} ({error}){advice}") from None
