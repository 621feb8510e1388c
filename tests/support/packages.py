"""Skips tests without the optional packages and programs that they need."""

from __future__ import annotations

import shutil

import pytest

from tfdist.cluster.launcher import plan

_NO_HOROVOD = "Horovod is not installed: make horovod"

needs_horovod = pytest.mark.skipif(not plan.horovod_installed(), reason=_NO_HOROVOD)
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin"
)


def require_horovod() -> None:
    """Skips the running test without Horovod."""
    if not plan.horovod_installed():
        pytest.skip(_NO_HOROVOD)


def require_obstore() -> None:
    """Skips the running test, or the tests of a file, without the client of object stores."""
    pytest.importorskip("obstore", reason="needs the extra 'cloud'")
