"""Training over two hosts whose network connection is cut."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.hosts import Hosts
from tests.processes.test_two_hosts import AS_ROOT, MPIRUN
from tests.support import ROOT
from tests.support.commands import needs_horovod, needs_mpi, wait_for
from tests.support.starting import tf_config
from tfdist.errors import PEER_LOST

START_SECONDS, END_SECONDS = 240.0, 60.0
TRAIN = [sys.executable, "-m", "tfdist.train", "--smoke"]


def by_flags(hosts: Hosts, *command: str) -> list[subprocess.Popen[str]]:
    """Starts a worker on each host, with the addresses in command-line flags."""
    workers = ",".join(f"{address}:2222" for address in hosts.addresses.values())
    flags = ["--strategy", "multi_worker", "--workers", workers]
    return [
        hosts.start(host, [*command, *flags, "--rank", str(rank)], cwd=ROOT)
        for rank, host in enumerate(hosts.addresses)
    ]


@pytest.mark.long  # they train there until the wire is cut
def test_multi_worker_trains_on_two_hosts_with_addresses_from_flags(
    two_hosts: Hosts, tmp_path: Path
) -> None:
    folder = ["--data-dir", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run")]
    processes = by_flags(two_hosts, *TRAIN, *folder)
    for process in processes:
        out, _ = process.communicate(timeout=START_SECONDS)
        assert process.returncode == 0, out
    assert (tmp_path / "run" / "model.keras").exists()


@pytest.mark.long
@needs_horovod
@needs_mpi
def test_horovod_trains_on_two_hosts_with_mpirun(two_hosts: Hosts, tmp_path: Path) -> None:
    folder = ["--data-dir", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run")]
    command = [*MPIRUN, *TRAIN, "--strategy", "horovod", *folder]
    done = two_hosts.run("a", command, env=AS_ROOT, cwd=ROOT, seconds=START_SECONDS)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "run" / "model.keras").exists()


def test_multi_worker_ranks_exit_after_a_network_cut(two_hosts: Hosts) -> None:
    addresses = [f"{address}:2222" for address in two_hosts.addresses.values()]
    processes = [
        two_hosts.start(
            host,
            [sys.executable, "-m", "tests.processes.faulty", "multi_worker", "none", "0"],
            env=tf_config(addresses, rank),
            cwd=ROOT,
        )
        for rank, host in enumerate(two_hosts.addresses)
    ]
    assert processes[0].stdout is not None
    assert any("training" in line for line in processes[0].stdout)
    two_hosts.cut()
    for rank, process in enumerate(processes):
        out, _ = process.communicate(timeout=END_SECONDS)
        assert f"rank {1 - rank} on" in out, out
        assert "has not responded" in out
        assert process.returncode == PEER_LOST


@needs_horovod
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(MPIRUN, marks=needs_mpi),
        pytest.param(["horovodrun", "--gloo", "-np", "2", "-H", "a:1,b:1"], marks=pytest.mark.long),
    ],
)
def test_horovod_ranks_exit_after_a_network_cut(
    launcher: list[str], two_hosts: Hosts, tmp_path: Path
) -> None:
    outputs = {host: tmp_path / f"output-{host}" for host in two_hosts.addresses}
    # Each rank writes to a file, because output from beyond the cut does not reach the launcher.
    # horovodrun still notices when a rank exits, because its ssh client runs on this machine, and
    # terminates the other rank.
    rank = f"{sys.executable} -m tests.processes.faulty horovod none 0 >{tmp_path}/output"
    command = [*launcher, "sh", "-c", f"trap '' TERM; exec {rank}-$(hostname) 2>&1"]
    two_hosts.start("a", command, env=AS_ROOT, cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_for(lambda: all("training" in _text(path) for path in outputs.values()), START_SECONDS)
    two_hosts.cut()
    # mpirun and its daemon wait for each other for minutes, until TCP times out.
    wait_for(lambda: not any(_trains(two_hosts, host) for host in outputs), END_SECONDS)
    for number, path in enumerate(outputs.values()):
        assert f"rank {1 - number} on" in path.read_text()
        assert "has not responded" in path.read_text()


def _trains(hosts: Hosts, host: str) -> bool:
    for pid in hosts.network.running(host):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "tests.processes.faulty" in psutil.Process(pid).cmdline():
                return True
    return False


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
