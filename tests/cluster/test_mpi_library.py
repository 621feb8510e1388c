"""Which MPI library is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdist.cluster import mpi_library


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
    found = mpi_library.find(str(tmp_path))
    assert found == mpi_library.Mpi(kind, version, str(tmp_path / "mpirun"), compiler=None)
    assert str(found) == f"{kind} {version}".strip()


def test_compiler_is_on_the_same_path(tmp_path: Path) -> None:
    program(tmp_path, "mpirun", "mpirun (Open MPI) 5.0.11")
    program(tmp_path, "mpicxx")
    found = mpi_library.find(str(tmp_path))
    assert found is not None
    assert found.compiler == str(tmp_path / "mpicxx")


def test_broken_mpirun_is_ignored(tmp_path: Path) -> None:
    assert mpi_library.find(str(tmp_path)) is None
    program(tmp_path, "mpirun", "mpirun (Open MPI) 4.1.4", code=1)
    assert mpi_library.find(str(tmp_path)) is None
