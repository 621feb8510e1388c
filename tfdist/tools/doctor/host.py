"""Checks the host: cores, memory, and whether its processes can connect to each other."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import psutil

from pipelines.cores import num_cores
from tfdist.cluster import networks
from tfdist.tools.doctor.report import Check

#: Bytes. TensorFlow and its libraries take half of that before a model is built.
_MIN_MEMORY = 1024**3

#: Bytes. NCCL and MPI exchange tensors through shared memory; containers have 64 MB by default.
_MIN_SHARED_MEMORY = 512 * 1024**2

_SHARED = Path("/dev/shm")
_LOOPBACK = "127.0.0.1"


def checks() -> list[Check]:
    """Returns the checks of cores, memory and ports."""
    cores = f"{num_cores()} of {os.cpu_count()} for this process"
    address = networks.this_host().default
    lines = [Check("cores", cores), _memory(), *_shared_memory(), _port("loopback", _LOOPBACK)]
    if address == _LOOPBACK:
        value = "the host has only the loopback address"
        fix = "to train on several hosts, connect this host to a network"
        return [*lines, Check("host address", value, "missing", fix)]
    return [*lines, _port("host address", address)]


def _memory() -> Check:
    memory = psutil.virtual_memory()
    value = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    if memory.available < _MIN_MEMORY:
        return Check(
            "memory", value, "wrong", "stop the largest processes: ps aux --sort=-rss | head"
        )
    return Check("memory", value)


def _shared_memory() -> list[Check]:
    if not _SHARED.is_dir():
        return []
    free = shutil.disk_usage(_SHARED).free
    value = f"{free / 1e9:.2f} GB free in {_SHARED}"
    if free < _MIN_SHARED_MEMORY:
        fix = f"in a container: run it with --shm-size=2g; otherwise delete files in {_SHARED}"
        return [Check("shared memory", value, "missing", fix)]
    return [Check("shared memory", value)]


def _port(name: str, address: str) -> Check:
    """Listens on a free port of an address and connects to it."""
    try:
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        value = f"{address}: {error.strerror or error}"
        fix = f"allow processes of this host to connect to {address}: ip addr; iptables -L"
        return Check(name, value, "wrong", fix)
    return Check(name, f"{address}: accepts connections")
