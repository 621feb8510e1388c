"""Which MPI a machine has: what `mpirun` says of itself. Imports no TensorFlow."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import NamedTuple

#: What the first line of `mpirun --version` looks like, and whose it is.
_KINDS = {
    r"\(Open MPI\) ([\w.]+)": "Open MPI",
    r"Intel\(R\) MPI Library.* Version ([\d.]+)": "Intel MPI",
    r"Version:\s+([\w.]+)": "MPICH",  # of Hydra, which many kinds of MPICH start
}


class Mpi(NamedTuple):
    """An MPI.

    Attributes:
        kind: `"Open MPI"`, `"Intel MPI"`, `"MPICH"` or, where it says nothing known, `"MPI"`.
        version: As in `"4.1.4"`; empty where unknown.
        mpirun: The path of its launcher.
        compiler: The path of its C++ compiler; None where only programs can be run.
    """

    kind: str
    version: str
    mpirun: str
    compiler: str | None

    def __str__(self) -> str:
        return f"{self.kind} {self.version}".rstrip()


def find(path: str | None = None) -> Mpi | None:
    """Returns the first MPI of a search path, or None.

    Args:
        path: As the variable PATH; None: that of this process.
    """
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
