"""Starts device servers on this host for tests."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys

from tests.support import ROOT
from tfdist.cluster.networks import free_ports
from tfdist.cluster.remote.heartbeat import wait_for

#: Time for servers to start on a busy machine.
START_SECONDS = 240.0


def start(port: int) -> subprocess.Popen[bytes]:
    """Starts a device server in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tfdist.cluster.remote", str(port)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@functools.cache
def devices(num_servers: int) -> tuple[str, ...]:
    """Returns a device of each of some servers, which end with this process."""
    ports = free_ports(num_servers)
    for port in ports:
        server = start(port)
        # This process ends without TensorFlow's cleanup, or it would wait for the servers.
        atexit.register(server.kill)
    addresses = [f"localhost:{port}" for port in ports]
    wait_for(addresses, START_SECONDS)
    return tuple(f"{address}/CPU:0" for address in addresses)
