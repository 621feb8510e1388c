"""Builds the unpatched source from PyPI, with the headers in `include` before TensorFlow's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import psutil
from rich.progress import Progress

from pipelines.cores import num_cores
from tfdist.console import folders
from tfdist.errors import InstallError
from tfdist.tools.install_horovod import requirements

#: A setuptools version that supports Horovod's setup.py, and the packages that setup.py requires.
_BUILD_TOOLS = ("setuptools<70", "wheel", "packaging", "cloudpickle", "psutil", "PyYAML")

#: Memory of one compiler process for TensorFlow's headers, in bytes.
_COMPILER_BYTES = 2 * 1024**3

_ERRORS_SHOWN = 6


def wheel(folder: Path, with_mpi: bool) -> None:
    """Builds Horovod's wheel, and writes it and the build log to a folder.

    Args:
        folder: The folder, which is created if it does not exist. A wheel in it is replaced.
        with_mpi: Whether to build with the MPI on PATH in addition to Gloo.

    Raises:
        InstallError: The build failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with folders.temporary("horovod-") as work:
        build_tools = Path(work, "tools")
        # Not in the environment, which may have a newer setuptools.
        needed = _BUILD_TOOLS if shutil.which("cmake") else (*_BUILD_TOOLS, "cmake")
        requirements.pip("install", "--target", str(build_tools), *needed)
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"]
        # The build must import TensorFlow. No cache, because pip's does not depend on TensorFlow's
        # version.
        command += ["--no-build-isolation", "--no-cache-dir", "--no-binary=horovod"]
        command += [f"--wheel-dir={work}", f"horovod=={requirements.HOROVOD}"]
        _run(command, _environment(build_tools, with_mpi), folder / "build.log")
        built = next(Path(work).glob("horovod-*.whl"))
        # Renamed atomically, so that other processes never see an incomplete wheel.
        shutil.copy(built, folder / "wheel.part")
        (folder / "wheel.part").replace(folder / built.name)


def _environment(build_tools: Path, with_mpi: bool) -> dict[str, str]:
    """Returns the environment of the build. The user's variables take precedence over defaults."""
    headers = str(Path(__file__).with_name("include"))
    environ = {
        # CMake 4 refuses Gloo's old files unless this is set.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if with_mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if toolkit := requirements.home_to_set():
        environ["HOROVOD_CUDA_HOME"] = str(toolkit)
    environ |= os.environ
    environ["CPATH"] = _join_paths(headers, environ.get("CPATH"))
    environ["PATH"] = _join_paths(str(build_tools / "bin"), requirements.search_path())
    environ["PYTHONPATH"] = _join_paths(str(build_tools), environ.get("PYTHONPATH"))
    environ["LDFLAGS"] = f"{environ.get('LDFLAGS', '')} -s -Wl,-rpath,{_rpath()}".strip()
    by_memory = psutil.virtual_memory().available // _COMPILER_BYTES
    num_jobs = max(1, min(num_cores(), by_memory))
    environ["MAKEFLAGS"] = f"-j{num_jobs}"  # replaces flags of an outer make
    return environ


def _rpath() -> str:
    r"""Returns the relative path from Horovod's library to the environment's, with PyPI's MPI.

    It is relative so that a cached wheel finds the MPI of any environment. The shell that runs the
    linker removes the backslash.
    """
    home = Path(sysconfig.get_path("platlib"), "horovod", "tensorflow")
    return r"\$ORIGIN/" + os.path.relpath(Path(sys.prefix, "lib"), home)


def _join_paths(first: str, paths: str | None) -> str:
    return os.pathsep.join(filter(None, [first, paths]))


def _run(command: list[str], environ: dict[str, str], log: Path) -> None:
    """Runs the build with a progress bar from make's output, and writes all output to the log."""
    errors: list[str] = []
    with (
        log.open("w") as file,
        Progress(transient=True) as progress,
        subprocess.Popen(
            command,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        task = progress.add_task("compiling", total=100)
        for line in process.stdout or ():
            file.write(line)
            if match := re.match(r"\s*\[\s*(\d+)%\]", line):
                progress.update(task, completed=int(match[1]))
            elif re.search(r"error: |CMake Error|No space left", line, re.IGNORECASE):
                errors.append(line.strip()[:300])
    if process.returncode:
        shown = "\n".join(errors[:_ERRORS_SHOWN])  # the first errors cause the others
        raise InstallError(f"Building Horovod failed. The log is {log}. First errors:\n{shown}")
