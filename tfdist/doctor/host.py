"""The host: cores, memory, and whether processes can listen and reach each other."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import psutil

from tfdist.cluster import networks
from tfdist.doctor.check import Check

#: TensorFlow with its libraries takes half of it before any model.
_LEAST_MEMORY = 1024**3

#: NCCL and MPI hand tensors from process to process here; containers get 64 MB by default.
_LEAST_SHARED = 512 * 1024**2

_SHARED = Path("/dev/shm")
_LOOPBACK = "127.0.0.1"


def checks() -> list[Check]:
    """Returns the lines on cores, memory and ports."""
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process"
    own = networks.this_host().default
    lines = [Check("cores", cores), _memory(), *_shared_memory(), _port("loopback", _LOOPBACK)]
    if own == _LOOPBACK:
        value = "the host has no address but the loopback's"
        return [*lines, Check("own address", value, "missing", "connect it to reach other hosts")]
    return [*lines, _port("own address", own)]


def _memory() -> Check:
    memory = psutil.virtual_memory()
    value = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    if memory.available < _LEAST_MEMORY:
        return Check("memory", value, "wrong", "end what fills it: ps aux --sort=-rss | head")
    return Check("memory", value)


def _shared_memory() -> list[Check]:
    if not _SHARED.is_dir():
        return []
    free = shutil.disk_usage(_SHARED).free
    value = f"{free / 1e9:.2f} GB free in {_SHARED}"
    if free < _LEAST_SHARED:
        cure = "in a container: run it with --shm-size=2g; else delete what is left over there"
        return [Check("shared memory", value, "missing", cure)]
    return [Check("shared memory", value)]


def _port(name: str, address: str) -> Check:
    """Listens on a free port of an address and connects to it."""
    try:
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        value = f"{address}: {error.strerror or error}"
        cure = f"let processes of this host connect to {address}: ip addr; iptables -L"
        return Check(name, value, "wrong", cure)
    return Check(name, f"{address}: listens and connects")
