"""The build itself: PyPI's source, unpatched, with the headers of `include` before TensorFlow's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import psutil
from rich.progress import Progress

from tfdist.errors import InstallError
from tfdist.install_horovod import cuda, tools, versions

#: A setuptools of the age of Horovod's setup.py; the rest is what that asks for.
_BUILD_TOOLS = ("setuptools<70", "wheel", "packaging", "cloudpickle", "psutil", "PyYAML")

#: Memory that one compiler takes on TensorFlow's headers, in bytes.
_COMPILER_BYTES = 2 * 1024**3

_ERRORS_SHOWN = 6


def wheel(folder: Path, with_mpi: bool) -> None:
    """Builds Horovod's wheel and puts it, with the log of the build, into a folder.

    Args:
        folder: Made where it does not exist; a wheel in it is replaced.
        with_mpi: Whether the MPI on PATH becomes a controller beside Gloo.

    Raises:
        InstallError: The build failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="horovod-") as work:
        own_tools = Path(work, "tools")
        # Beside the environment, not in it: whoever has a newer setuptools there keeps it.
        needed = _BUILD_TOOLS if shutil.which("cmake") else (*_BUILD_TOOLS, "cmake")
        tools.pip("install", "--target", str(own_tools), *needed)
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps"]
        # TensorFlow has to be seen by the build. And pip would keep one wheel for all TensorFlows.
        command += ["--no-build-isolation", "--no-cache-dir", "--no-binary=horovod"]
        command += [f"--wheel-dir={work}", f"horovod=={versions.HOROVOD}"]
        _run(command, _environment(own_tools, with_mpi), folder / "build.log")
        built = next(Path(work).glob("horovod-*.whl"))
        # Whoever looks at the same moment sees a whole wheel or none.
        shutil.copy(built, folder / "wheel.part")
        (folder / "wheel.part").replace(folder / built.name)


def _environment(own_tools: Path, with_mpi: bool) -> dict[str, str]:
    """The variables of the build, over those of this process: HOROVOD_GPU_OPERATIONS and such."""
    headers = str(Path(__file__).with_name("include"))
    environ = {
        # CMake 4 refuses files as old as Gloo's, unless told which version's rules hold.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if with_mpi else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if toolkit := cuda.home_to_set():
        environ["HOROVOD_CUDA_HOME"] = str(toolkit)
    environ |= os.environ
    environ["CPATH"] = _joined(headers, environ.get("CPATH"))
    environ["PATH"] = _joined(str(own_tools / "bin"), tools.search_path())
    environ["PYTHONPATH"] = _joined(str(own_tools), environ.get("PYTHONPATH"))
    environ["LDFLAGS"] = f"{environ.get('LDFLAGS', '')} -s -Wl,-rpath,{_to_libraries()}".strip()
    environ["MAKEFLAGS"] = f"-j{_num_jobs()}"  # those of an outer make are not for this one
    return environ


def _to_libraries() -> str:
    r"""The way from Horovod's library to the environment's, where PyPI's MPI lies.

    Relative, so that a kept wheel finds the MPI of the environment that it is put into. The shell
    that links takes the backslash away.
    """
    home = Path(sysconfig.get_path("platlib"), "horovod", "tensorflow")
    return r"\$ORIGIN/" + os.path.relpath(Path(sys.prefix, "lib"), home)


def _num_jobs() -> int:
    """One for each core, as far as memory goes."""
    by_memory = psutil.virtual_memory().available // _COMPILER_BYTES
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))


def _joined(first: str, rest: str | None) -> str:
    return os.pathsep.join(filter(None, [first, rest]))


def _run(command: list[str], environ: dict[str, str], log: Path) -> None:
    """Runs the build; make tells how far it is, everything goes to the log."""
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
        shown = "\n".join(errors[:_ERRORS_SHOWN])  # the first ones are the cause of the rest
        raise InstallError(f"Horovod's build failed; {log} holds all of it:\n{shown}")
