"""The MPI library of this machine, and ranks that find each other over it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.commands import needs_mpi
from tests.support.starting import ENVIRON, run
from tfdist.cluster import Cluster, exchange_addresses, record
from tfdist.cluster.launcher import mpirun
from tfdist.errors import ClusterError


def program(folder: Path, name: str, message: str = "", code: int = 0) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho '{message}'\nexit {code}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("message", "kind", "version"),
    [
        ("mpirun (Open MPI) 4.1.4", "Open MPI", "4.1.4"),
        ("HYDRA build details:\n    Version:      4.2.0", "MPICH", "4.2.0"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 1", "Intel MPI", "2021.13"),
        ("something else", "MPI", ""),
    ],
)
def test_detects_the_mpi_library(message: str, kind: str, version: str, tmp_path: Path) -> None:
    program(tmp_path, "mpirun", message)
    result = mpirun.find(str(tmp_path))
    assert result == mpirun.Mpi(kind, version, str(tmp_path / "mpirun"), compiler=None)
    assert str(result) == f"{kind} {version}".strip()


def test_compiler_is_on_the_same_path(tmp_path: Path) -> None:
    program(tmp_path, "mpirun", "mpirun (Open MPI) 5.0.11")
    program(tmp_path, "mpicxx")
    result = mpirun.find(str(tmp_path))
    assert result is not None
    assert result.compiler == str(tmp_path / "mpicxx")


def test_broken_mpirun_is_ignored(tmp_path: Path) -> None:
    assert mpirun.find(str(tmp_path)) is None
    program(tmp_path, "mpirun", "mpirun (Open MPI) 4.1.4", code=1)
    assert mpirun.find(str(tmp_path)) is None


PROGRAM = """
from tests.support import ROOT
from tfdist import cluster
me = cluster.exchange_addresses(cluster.discover())
print(me.rank, me.size, me.local_rank, me.local_size, ",".join(me.addresses))
"""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@needs_mpi
def test_ranks_under_mpirun_find_each_other() -> None:
    pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    command = ("mpirun", "--oversubscribe", "-np", "2")
    done = run(*command, sys.executable, "-c", PROGRAM, env=ENVIRON | AS_ROOT)
    first, second = sorted(line.split() for line in done.stdout.splitlines())
    assert first[:4] == ["0", "2", "0", "2"]
    assert second[:4] == ["1", "2", "1", "2"]
    assert first[4] == second[4]
    assert len(set(first[4].split(","))) == 2


def test_missing_mpi4py_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ClusterError, match="pip install mpi4py"):
        exchange_addresses(Cluster("Open MPI", 0, 2))


# ---- cores ----


@pytest.mark.parametrize(
    ("own", "local_size", "rows"),
    [
        (
            1,
            2,
            {"cores": "1 of 8: the launcher binds each worker to cores; use mpirun --bind-to none"},
        ),
        (4, 2, {}),
        (8, 2, {}),
        (8, 1, {}),
    ],
)
def test_reports_idle_cores(
    own: int, local_size: int, rows: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = {0: range(own), os.getppid(): range(8)}
    monkeypatch.setattr(os, "sched_getaffinity", cores.__getitem__)
    assert record.describe_binding(local_size) == rows


def test_unknown_affinity_of_the_launcher_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def affinity(process_id: int) -> set[int]:
        if process_id:
            raise PermissionError
        return {0}

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert record.describe_binding(2) == {}
