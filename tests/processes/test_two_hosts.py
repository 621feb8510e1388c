"""The two simulated hosts, and Horovod between them."""

from __future__ import annotations

import sys

import pytest

from benchmarks.hosts import Hosts
from tests.support import ROOT
from tests.support.commands import needs_horovod, needs_mpi

#: Open MPI would bind both ranks to the first core, which these hosts share. Its processes must
#: not exit immediately: mpirun 5.0.11 hangs in one of 75 runs of `hostname`.
MPIRUN = ["mpirun", "--bind-to", "none", "-H", "a:1,b:1"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def connect(hosts: Hosts, host: str, address: str, port: int) -> str:
    """Tries to connect to an address from a host, and returns the received text or the error."""
    program = (
        "import socket\n"
        "try:\n"
        f"    one = socket.create_connection(({address!r}, {port}), timeout=2)\n"
        "    print(one.recv(10).decode())\n"
        "except OSError as error:\n"
        "    print(type(error).__name__)"
    )
    return hosts.run(host, [sys.executable, "-c", program], seconds=30).stdout.strip()


def test_hosts_share_only_the_network(two_hosts: Hosts) -> None:
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


def test_hosts_do_not_share_memory(two_hosts: Hosts) -> None:
    assert two_hosts.run("a", ["touch", "/dev/shm/mark"]).returncode == 0
    assert two_hosts.run("b", ["ls", "/dev/shm"]).stdout == ""


def test_ssh_does_not_pass_environment_variables(two_hosts: Hosts) -> None:
    command = ["ssh", "-x", "-o", "StrictHostKeyChecking=no", "b", "echo", "$(hostname)$MARK"]
    assert two_hosts.run("a", command, env={"MARK": "!"}).stdout == "b\n"


@needs_horovod
@pytest.mark.parametrize(
    ("launcher", "controller"),
    [
        pytest.param(MPIRUN, "MPI", marks=needs_mpi),
        (["horovodrun", "--gloo", "-np", "2", "-H", "a:1,b:1"], "Gloo"),
    ],
)
def test_horovod_sums_over_both_hosts(
    launcher: list[str], controller: str, two_hosts: Hosts
) -> None:
    command = [*launcher, sys.executable, str(ROOT / "tests/processes/horovod_sum.py")]
    done = two_hosts.run("a", command, env=AS_ROOT, cwd=ROOT)
    for rank, host in enumerate("ab"):
        assert f"rank {rank} of 2 on {host} over {controller}: 3.0" in done.stdout, done.stdout
