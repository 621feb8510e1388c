"""The two hosts themselves, and Horovod between them."""

from __future__ import annotations

import importlib.util
import shutil
import sys

import pytest

from benchmarks.hosts import Hosts
from tests.support import ROOT

#: Open MPI would bind both ranks to the first core, which these hosts share. What it starts must
#: live for a moment: mpirun 5.0.11 waits for ever, one time in 75, where `hostname` ended at once.
MPIRUN = ["mpirun", "--bind-to", "none", "-H", "a:1,b:1"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="no Horovod: make horovod"
)
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin"
)


def connect(hosts: Hosts, host: str, address: str, port: int) -> str:
    """What comes of connecting to an address from a host."""
    program = (
        "import socket\n"
        "try:\n"
        f"    one = socket.create_connection(({address!r}, {port}), timeout=2)\n"
        "    print(one.recv(10).decode())\n"
        "except OSError as error:\n"
        "    print(type(error).__name__)"
    )
    return hosts.run(host, [sys.executable, "-c", program], seconds=30).stdout.strip()


def test_hosts_share_the_wire_and_nothing_else(two_hosts: Hosts) -> None:
    program = (
        "import socket\n"
        "server = socket.create_server(('', 5000))\n"
        "print('listening', flush=True)\n"
        "while True: server.accept()[0].sendall(b'hello')"
    )
    server = two_hosts.start("b", [sys.executable, "-c", program])
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    assert connect(two_hosts, "a", two_hosts.addresses["b"], 5000) == "hello"
    assert connect(two_hosts, "a", "b", 5000) == "hello"
    assert connect(two_hosts, "a", "127.0.0.1", 5000) == "ConnectionRefusedError"
    two_hosts.cut()
    assert connect(two_hosts, "a", two_hosts.addresses["b"], 5000) in ("TimeoutError", "OSError")
    two_hosts.mend()
    assert connect(two_hosts, "a", two_hosts.addresses["b"], 5000) == "hello"
    two_hosts.end_all()
    assert server.wait(30) < 0


def test_memory_is_each_hosts_own(two_hosts: Hosts) -> None:
    assert two_hosts.run("a", ["touch", "/dev/shm/mark"]).returncode == 0
    assert two_hosts.run("b", ["ls", "/dev/shm"]).stdout == ""


def test_ssh_leaves_the_callers_variables_behind(two_hosts: Hosts) -> None:
    asked = ["ssh", "-x", "-o", "StrictHostKeyChecking=no", "b", "echo", "$(hostname)$MARK"]
    assert two_hosts.run("a", asked, env={"MARK": "!"}).stdout == "b\n"


@needs_horovod
@pytest.mark.parametrize(
    ("launcher", "controller"),
    [
        pytest.param(MPIRUN, "MPI", marks=needs_mpi),
        (["horovodrun", "--gloo", "-np", "2", "-H", "a:1,b:1"], "Gloo"),
    ],
)
def test_horovod_sums_over_both(launcher: list[str], controller: str, two_hosts: Hosts) -> None:
    command = [*launcher, sys.executable, str(ROOT / "tests/processes/horovod_sum.py")]
    done = two_hosts.run("a", command, env=AS_ROOT, cwd=ROOT)
    for rank, host in enumerate("ab"):
        assert f"rank {rank} of 2 on {host} over {controller}: 3.0" in done.stdout, done.stdout
