"""The order of the installation: what is there already, what was kept, what has to be built."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

from tfdist.cluster.mpi_library import Mpi
from tfdist.errors import InstallError
from tfdist.install_horovod import build, tools, versions


def install(mpi: str = "auto", rebuild: bool = False) -> None:
    """Installs Horovod into the environment of this Python, building it where no wheel was kept.

    Args:
        mpi: `"system"`: the MPI on PATH; `"pypi"`: Open MPI's wheel, installed into the
            environment; `"auto"`: the first of the two that there is; `"none"`: Gloo alone.
        rebuild: Builds although Horovod is installed or its wheel kept.

    Raises:
        InstallError: Something that the build needs is not here, or it failed.
    """
    tensorflow = versions.tensorflow()
    if tensorflow is None:
        raise InstallError("Horovod is built against TensorFlow: pip install tensorflow first.")
    if versions.horovod_fits() and not rebuild:
        print(f"Horovod {versions.HOROVOD} for TensorFlow {tensorflow} is installed already")
        return
    chosen = tools.choose_mpi(mpi)
    folder = _kept_in(tensorflow, chosen)
    if rebuild or not list(folder.glob("*.whl")):
        tools.check_compiler()
        controllers = f"{chosen} and Gloo" if chosen else "Gloo alone"
        print(
            f"building Horovod {versions.HOROVOD} for TensorFlow {tensorflow} with {controllers}: "
            "some three minutes on two cores, once",
            flush=True,
        )
        build.wheel(folder, with_mpi=chosen is not None)
    wheel = str(next(folder.glob("*.whl")))
    # One that was built for another TensorFlow has the same version, which pip would leave alone.
    tools.pip("install", "--force-reinstall", "--no-deps", wheel)
    tools.pip("install", wheel)  # what it needs
    print(f"Horovod {versions.HOROVOD} is installed; its wheel is kept in {folder}")


def _kept_in(tensorflow: str, mpi: Mpi | None) -> Path:
    """The folder of the wheel that fits this TensorFlow, Python, MPI and these build variables."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    controllers = "gloo"
    settings = sorted(f"{name}={os.environ[name]}" for name in os.environ if _matters(name))
    if mpi:
        controllers = f"{mpi.kind}-{mpi.version.partition('.')[0]}".lower().replace(" ", "")
        # A library knows where a system's MPI lies, and finds the environment's in any.
        settings += [] if tools.of_environment(mpi) else [str(mpi.compiler)]
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    mark = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:8]
    name = f"horovod-{versions.HOROVOD}-tensorflow-{tensorflow}-{python}-{controllers}-{mark}"
    return cache / "tfdist" / name


def _matters(variable: str) -> bool:
    """Tells whether a variable of the environment may change what is built."""
    return variable in ("CXX", "CXXFLAGS", "CUDA_HOME") or variable.startswith("HOROVOD_")
