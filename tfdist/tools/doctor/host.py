"""Checks the host: versions of libraries, cores, memory, and connections of its processes."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from pipelines.cores import num_cores
from tfdist.cluster import networks
from tfdist.tools.doctor.report import Check
from tfdist.tools.install_horovod import requirements
from tfdist.version import TESTED, __version__, untested

#: Bytes. TensorFlow and its libraries take half of that before a model is built.
_MIN_MEMORY = 1024**3

#: Bytes. NCCL and MPI exchange tensors through shared memory; containers have 64 MB by default.
_MIN_SHARED_MEMORY = 512 * 1024**2

_SHARED = Path("/dev/shm")
_LOOPBACK = "127.0.0.1"


def library_checks() -> list[Check]:
    """Returns a check for Python, for tfdist, and for each library that it requires."""
    python = platform.python_version()
    lines = [Check("python", _with_tested("python", python)), Check("tfdist", __version__)]
    return lines + [_library(requirement) for requirement in _requirements()]


def _requirements() -> list[Requirement]:
    """Returns the requirements of tfdist; the main ones if it is not installed as a package.

    TensorFlow belongs to an extra, because several distributions provide it.
    """
    try:
        texts = metadata.requires("tfdist") or []
    except metadata.PackageNotFoundError:
        texts = ["keras", "numpy"]
    parsed = map(Requirement, [f"tensorflow>={TESTED['tensorflow'][0]}", *texts])
    return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def _library(required: Requirement) -> Check:
    is_tensorflow = required.name == "tensorflow"  # which several distributions provide
    name, fix = required.name, f"pip install '{required}'"
    version = requirements.tensorflow_version() if is_tensorflow else requirements.version_of(name)
    if version is None:
        return Check(name, "not installed", "wrong", fix)
    if required.specifier.contains(version, prereleases=True):
        return Check(name, _with_tested(name, version))
    return Check(name, f"{version}, but tfdist needs {required.specifier}", "wrong", fix)


def _with_tested(name: str, version: str) -> str:
    tested = untested({name: version}).get(name)
    return version if tested is None else f"{version} (tested: {tested})"


def checks() -> list[Check]:
    """Returns the checks of cores, memory and ports."""
    cores = f"{num_cores()} of {os.cpu_count()} for this process"
    address = networks.this_host().default
    lines = [Check("cores", cores), _memory(), *_shared_memory(), _port("loopback", _LOOPBACK)]
    if address == _LOOPBACK:
        value = "the host has only the loopback address"
        fix = "to train on several hosts, connect this host to a network"
        return [*lines, Check("host address", value, "missing", fix)]
    return [*lines, _port("host address", address)]


def _memory() -> Check:
    memory = psutil.virtual_memory()
    value = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
    if memory.available < _MIN_MEMORY:
        return Check(
            "memory", value, "wrong", "stop the largest processes: ps aux --sort=-rss | head"
        )
    return Check("memory", value)


def _shared_memory() -> list[Check]:
    if not _SHARED.is_dir():
        return []
    free = shutil.disk_usage(_SHARED).free
    value = f"{free / 1e9:.2f} GB free in {_SHARED}"
    if free < _MIN_SHARED_MEMORY:
        fix = f"in a container: run it with --shm-size=2g; otherwise delete files in {_SHARED}"
        return [Check("shared memory", value, "missing", fix)]
    return [Check("shared memory", value)]


def _port(name: str, address: str) -> Check:
    """Listens on a free port of an address and connects to it."""
    try:
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        value = f"{address}: {error.strerror or error}"
        fix = f"allow processes of this host to connect to {address}: ip addr; iptables -L"
        return Check(name, value, "wrong", fix)
    return Check(name, f"{address}: accepts connections")
