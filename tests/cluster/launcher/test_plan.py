"""Placement and environment of workers, and the arguments of mpirun and horovodrun."""

from __future__ import annotations

import os
import re
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.commands import needs_horovod, needs_mpi
from tests.support.starting import launch
from tfdist import cluster
from tfdist.cluster.launcher import mpirun, plan
from tfdist.cluster.launcher.options import Options, parse
from tfdist.errors import LaunchError


def test_slots_match_horovod() -> None:
    hosts = pytest.importorskip("horovod.runner.common.util.hosts")
    wanted = hosts.get_host_assignments(hosts.parse_hosts("a:3,b:1,c:2"), 6)
    for slot, other in zip(plan.slots({"a": 3, "b": 1, "c": 2}), wanted, strict=True):
        mine = dict(vars(slot))
        assert vars(other) == {"hostname": mine.pop("host"), **mine}


def test_all_workers_get_the_same_cluster() -> None:
    slots = plan.slots({"a": 2, "b": 1})
    planned = plan.workers(["run"], slots, ports=plan.ports_from(5000, slots), interface="eth0")
    seen = [cluster.discover(process.environ) for process in planned.processes]
    assert [found.rank for found in seen] == [0, 1, 2]
    assert [found.local_rank for found in seen] == [0, 1, 0]
    assert {found.addresses for found in seen} == {("a:5001", "a:5002", "b:5001")}
    assert planned.rendezvous == "a:5000"
    assert [process.host for process in planned.processes] == ["a", "a", "b"]


def test_servers_and_workers_get_the_same_cluster() -> None:
    planned = plan.with_parameter_servers(["run"], num_workers=2, num_ps=1)
    seen = [cluster.discover(process.environ) for process in planned]
    assert [found.task for found in seen] == ["chief", "worker", "worker", "ps"]
    assert [process.name for process in planned] == ["chief", "worker 0", "worker 1", "ps 0"]
    assert len({*seen[0].addresses, *seen[0].ps}) == 4
    assert [process.ends_run for process in planned] == [True, False, False, False]


def parsed(*flags: str) -> Options:
    return parse([*flags, "--", "program", "--flag"])


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("Open MPI", [], "--oversubscribe -np 2 "),
        ("Open MPI", ["--hosts", "a:2,b:1"], "-H a:2,b:1 -np 3 "),
        ("MPICH", ["--num-workers", "3"], "mpirun -n 3 "),
        ("Intel MPI", ["--hosts", "a:2,b:1"], "-hosts a:2,b:1 -n 3 "),
    ],
)
def test_mpirun_command(
    kind: str, flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpirun, "find", lambda: mpirun.Mpi(kind, "1", "/bin/mpirun", None))
    process = mpirun.process(parsed("--via", "mpirun", *flags))
    line = " ".join(process.command)
    assert words in line
    assert line.endswith("-m tfdist.cluster.launcher.output program --flag")
    assert ("OMPI_ALLOW_RUN_AS_ROOT" in process.environ) == (
        kind == "Open MPI" and os.geteuid() == 0
    )


def test_horovodrun_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "search_path", lambda: str(tmp_path))
    with pytest.raises(LaunchError, match="Run tfdist install_horovod"):
        mpirun.process(parsed("--via", "horovodrun"))
    (tmp_path / "horovodrun").touch(0o755)
    process = mpirun.process(parsed("--via", "horovodrun", "--hosts", "a:2,b:1"))
    assert process.command[3:] == ("-np", "3", "-H", "a:2,b:1", "program", "--flag")


def test_mpirun_without_mpi_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "find", lambda: None)
    with pytest.raises(LaunchError, match="no MPI is installed"):
        mpirun.process(parsed("--via", "mpirun"))


@needs_mpi
def test_lines_under_mpirun_begin_with_the_rank(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, pathlib, psutil, sys, time\n"
        "from tfdist import cluster\n"
        "mine = pathlib.Path(__file__).with_name(str(cluster.rank()))\n"
        "print('out', cluster.rank(), flush=True)\n"
        "mine.with_suffix('.half').write_text(str(os.getppid()))\n"
        "mine.with_suffix('.half').rename(mine)\n"
        "if cluster.rank() == 0: sys.exit()\n"
        "while not (other := mine.with_name('0')).exists(): time.sleep(0.05)\n"
        # mpirun kills the other rank and its relay as soon as one rank fails
        "while psutil.pid_exists(int(other.read_text())): time.sleep(0.05)\n"
        "sys.exit(5)\n"
    )
    done = launch("--via", "mpirun", "--", sys.executable, str(tmp_path / "program.py"))
    assert sorted(done.stdout.splitlines())[:2] == ["[0] out 0", "[1] out 1"]
    assert done.returncode == 5


@needs_horovod
def test_horovodrun_starts_workers(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("from tfdist import cluster; print('rank', cluster.rank(), 'of 2')")
    done = launch("--via", "horovodrun", "--", sys.executable, str(path))
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("rank . of 2", done.stdout)) == ["rank 0 of 2", "rank 1 of 2"]


@needs_horovod
def test_rendezvous_server_stores_values() -> None:
    slots = plan.slots({plan.LOCAL: 2})
    planned = plan.workers(["run"], slots)
    with plan.rendezvous(planned, slots):
        url = f"http://{planned.rendezvous}/scope/key"
        put = urllib.request.Request(url, data=b"value", method="PUT")
        urllib.request.urlopen(put, timeout=10).close()
        with urllib.request.urlopen(url, timeout=10) as got:
            assert got.read() == b"value"
