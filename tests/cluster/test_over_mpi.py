"""Addresses exchanged over MPI: under mpirun if it is installed, and errors without it."""

from __future__ import annotations

import sys

import pytest

from tests.support.packages import needs_mpi
from tests.support.starting import ENVIRON, run
from tfdist.cluster import Cluster, exchange_addresses
from tfdist.errors import ClusterError

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
    mpirun = ("mpirun", "--oversubscribe", "-np", "2")
    done = run(*mpirun, sys.executable, "-c", PROGRAM, env=ENVIRON | AS_ROOT)
    first, second = sorted(line.split() for line in done.stdout.splitlines())
    assert first[:4] == ["0", "2", "0", "2"]
    assert second[:4] == ["1", "2", "1", "2"]
    assert first[4] == second[4]
    assert len(set(first[4].split(","))) == 2


def test_missing_mpi4py_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ClusterError, match="pip install mpi4py"):
        exchange_addresses(Cluster("Open MPI", 0, 2))
