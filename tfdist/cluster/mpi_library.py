"""Finds the installed MPI with `mpirun --version`. Imports no TensorFlow."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from typing import NamedTuple

#: Pattern of the first line of `mpirun --version`, and the MPI that prints it.
_KINDS = {
    r"\(Open MPI\) ([\w.]+)": "Open MPI",
    r"Intel\(R\) MPI Library.* Version ([\d.]+)": "Intel MPI",
    r"Version:\s+([\w.]+)": "MPICH",  # Hydra, the launcher of MPICH and its derivatives
}


class Mpi(NamedTuple):
    """An installed MPI.

    Attributes:
        kind: `"Open MPI"`, `"Intel MPI"`, `"MPICH"`, or `"MPI"` if it is unknown.
        version: Such as `"4.1.4"`; empty if it is unknown.
        mpirun: Path of its launcher.
        compiler: Path of its C++ compiler; None if it has none.
    """

    kind: str
    version: str
    mpirun: str
    compiler: str | None

    def __str__(self) -> str:
        return f"{self.kind} {self.version}".rstrip()


def search_path() -> str:
    """Returns PATH with the programs of this Python environment, activated or not, first."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def find(path: str | None = None) -> Mpi | None:
    """Returns the first MPI on a search path, or None.

    Args:
        path: Folders in the format of PATH; None: `search_path()`.
    """
    path = search_path() if path is None else path
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        return None
    try:
        answer = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode:
        return None
    compiler = shutil.which("mpicxx", path=path)
    for pattern, kind in _KINDS.items():
        if match := re.search(pattern, answer.stdout):
            return Mpi(kind, match[1], mpirun, compiler)
    return Mpi("MPI", "", mpirun, compiler)
