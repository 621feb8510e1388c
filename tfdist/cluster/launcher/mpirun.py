"""The command lines of mpirun and horovodrun, and the MPI that is installed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from typing import NamedTuple

from tfdist.cluster.launcher.options import Options
from tfdist.cluster.launcher.plan import Process
from tfdist.cluster.messages import SECRET
from tfdist.errors import LaunchError

#: Environment variables to export to other hosts if they are set, so that programs are found.
_EXPORTED_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")

#: Horovod's default flags for Open MPI, with two dashes as version 5 requires.
_BINDING_ARGUMENTS = "--bind-to none --map-by slot"


def process(options: Options) -> Process:
    """Returns the launcher process that starts all workers.

    Raises:
        LaunchError: The launcher is not installed.
    """
    if options.via == "mpirun":
        return _mpirun(options)
    path = search_path()  # also works if the virtual environment is not activated
    program = shutil.which("horovodrun", path=path)
    if not program:
        raise LaunchError("--via horovodrun: Horovod is not installed. Run tfdist install_horovod.")
    hosts = ["-H", _slots(options)] if options.hosts else []
    head = (program, "--binding-args", _BINDING_ARGUMENTS, "-np", str(options.num_workers), *hosts)
    return Process("horovodrun", (*head, *options.command), {"PATH": path})


def _mpirun(options: Options) -> Process:
    """Returns the command with flags of Open MPI, or of Hydra (MPICH and Intel MPI)."""
    mpi = find()
    if mpi is None:
        raise LaunchError(
            "--via mpirun: no MPI is installed; tfdist doctor shows how to install one."
        )
    head, number = mpi.mpirun, str(options.num_workers)
    command = (sys.executable, "-m", "tfdist.cluster.launcher.output", *options.command)
    if mpi.kind != "Open MPI":
        hosts = ["-hosts", _slots(options)] if options.hosts else []
        # Hydra forwards SIGUSR1 to the ranks, but terminates them on SIGTERM.
        full_command = (head, *hosts, "-n", number, *command)
        return Process("mpirun", full_command, preempt_by=signal.SIGUSR1)
    hosts = ["-H", _slots(options)] if options.hosts else ["--oversubscribe"]
    names = (*_EXPORTED_VARIABLES, SECRET) if options.hosts else _EXPORTED_VARIABLES
    exported = [
        word for name in names if name in os.environ or name == SECRET for word in ("-x", name)
    ]
    # Otherwise, all threads of a worker would be bound to one core.
    flags = ["--bind-to", "none", *exported, *hosts, "-np", number]
    # Open MPI refuses to run as root without both variables.
    root_variables = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    environ = dict.fromkeys(root_variables, "1") if os.geteuid() == 0 else {}
    return Process("mpirun", (head, *flags, *command), environ, preempt_by=signal.SIGUSR1)


def _slots(options: Options) -> str:
    return ",".join(f"{host}:{number}" for host, number in options.hosts.items())


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
