"""Install Horovod: use what is installed already, or a cached wheel, or build one."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

from tfdist.cluster.mpi_library import Mpi
from tfdist.errors import InstallError
from tfdist.install_horovod import build, cuda, tools, versions

#: Variables that CMake, the compilers and Horovod's build read. Beside them: all of Horovod's own.
_VARIABLES = {
    "CC", "CFLAGS", "CXX", "CXXFLAGS", "LDFLAGS", "CUDAARCHS", "CUDACXX", "CUDAFLAGS",
    "CUDAHOSTCXX", "CUDAToolkit_ROOT", "CUDA_BIN_PATH", "CUDA_HOME", "CUDA_PATH", "NCCL_ROOT",
    "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "ROCM_PATH", "CCL_ROOT", "CCL_CONFIGURATION",
    "CMAKE_PREFIX_PATH", "CMAKE_INCLUDE_PATH", "CMAKE_LIBRARY_PATH",
}  # fmt: skip


def install(mpi: str = "auto", rebuild: bool = False) -> None:
    """Install Horovod into the environment of this Python; build it unless a wheel is cached.

    Args:
        mpi: `"system"`: the MPI on PATH; `"pypi"`: Open MPI's wheel, installed into the
            environment; `"auto"`: the first of the two that exists; `"none"`: Gloo alone.
        rebuild: Build even if Horovod is installed or its wheel is cached.

    Raises:
        InstallError: The host lacks something that the build needs, or the build failed.
    """
    tensorflow = versions.tensorflow()
    if tensorflow is None:
        raise InstallError("Horovod is built against TensorFlow: pip install tensorflow first.")
    # An installed Horovod does not say for which devices it was built, but the wheel's folder does.
    if versions.horovod_fits() and not rebuild and not cuda.operations():
        print(f"Horovod {versions.HOROVOD} for TensorFlow {tensorflow} is installed already")
        return
    chosen = tools.choose_mpi(mpi)
    folder = _cache_folder(tensorflow, chosen)
    if rebuild or not list(folder.glob("*.whl")):
        tools.check_compiler()
        cuda.check()
        controllers = f"{chosen} and Gloo" if chosen else "Gloo alone"
        print(
            f"building Horovod {versions.HOROVOD} for TensorFlow {tensorflow} with {controllers}: "
            "about three minutes on two cores, once",
            flush=True,
        )
        build.wheel(folder, with_mpi=chosen is not None)
    wheel = str(next(folder.glob("*.whl")))
    # pip would keep an installed Horovod of the same version, built for another TensorFlow.
    tools.pip("install", "--force-reinstall", "--no-deps", wheel)
    tools.pip("install", wheel)  # its dependencies
    print(f"Horovod {versions.HOROVOD} is installed; its wheel is cached in {folder}")


def _cache_folder(tensorflow: str, mpi: Mpi | None) -> Path:
    """Returns the cache folder of the wheel for this TensorFlow, Python, MPI and environment."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    controllers = "gloo"
    settings = sorted(f"{name}={os.environ[name]}" for name in os.environ if _matters(name))
    settings += cuda.settings()
    if mpi:
        controllers = f"{mpi.kind}-{mpi.version.partition('.')[0]}".lower().replace(" ", "")
        # A wheel stores the path of a system's MPI, but finds the environment's MPI in any of them.
        settings += [] if tools.of_environment(mpi) else [str(mpi.compiler)]
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    mark = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:8]
    name = f"horovod-{versions.HOROVOD}-tensorflow-{tensorflow}-{python}-{controllers}-{mark}"
    return cache / "tfdist" / name


def _matters(variable: str) -> bool:
    """Tell whether an environment variable may change what is built."""
    return variable in _VARIABLES or variable.startswith("HOROVOD_")
