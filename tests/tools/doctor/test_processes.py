"""Checks of the host, and of processes that start and find each other."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tfdist.cluster.launcher.mpirun import Mpi
from tfdist.tools.doctor import host, processes
from tfdist.tools.doctor.report import Check
from tfdist.tools.install_horovod import requirements

OPEN_MPI = Mpi("Open MPI", "4.1.4", "/usr/bin/mpirun", "/usr/bin/mpicxx")


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An installed Horovod with MPI and Gloo."""
    module = ModuleType("horovod.tensorflow")
    for name, built in {"mpi": True, "gloo": True, "nccl": 0}.items():
        setattr(module, f"{name}_built", lambda built=built: built)
    package = ModuleType("horovod")
    package.tensorflow = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", module)
    monkeypatch.setattr(requirements, "horovod_version", lambda: requirements.HOROVOD)
    monkeypatch.setattr(requirements, "horovod_fits", lambda: True)
    return module


def test_missing_mpi_is_no_failure() -> None:
    assert processes._mpi(None).state == "missing"
    assert processes._mpi(OPEN_MPI) == Check("MPI", "Open MPI 4.1.4: /usr/bin/mpirun")


def test_mpi4py_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    check = processes._mpi4py()
    assert (check.name, check.state) == ("mpi4py", "missing")
    assert check.fix.endswith("pip install mpi4py")
    vendor = SimpleNamespace(get_vendor=lambda: ("Open MPI", (5, 0, 11)))
    monkeypatch.setattr(processes.rendezvous, "load_mpi", lambda: vendor)
    assert processes._mpi4py() == Check("mpi4py", "loads Open MPI 5.0.11")


def test_missing_horovod_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "horovod_version", lambda: None)
    (check,) = processes._horovod(OPEN_MPI)
    assert check.state == "missing"
    assert check.fix.endswith(" -m tfdist install_horovod")


def test_horovod_of_another_tensorflow_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "horovod_version", lambda: requirements.HOROVOD)
    monkeypatch.setattr(requirements, "horovod_was_built_for", lambda: "2.20.0")
    monkeypatch.setattr(requirements, "tensorflow_version", lambda: "2.21.0")
    (check,) = processes._horovod(OPEN_MPI)
    assert check.state == "wrong"
    assert "built against TensorFlow 2.20.0, not 2.21.0" in check.value


def test_horovod_that_does_not_load_is_red(
    horovod: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    (check,) = processes._horovod(OPEN_MPI)
    assert check.state == "wrong"
    assert check.fix.endswith(" --rebuild")


@pytest.mark.usefixtures("horovod")
def test_reports_the_controllers_of_horovod() -> None:
    results = {check.name: check.value for check in processes._horovod(OPEN_MPI)}
    assert results["Horovod's controllers"] == "MPI, Gloo"
    assert results["Horovod's operations"] == "MPI, Gloo"


@pytest.mark.usefixtures("horovod")
@pytest.mark.parametrize("absent", [[], ["nvcc (the CUDA compiler)"]])
def test_horovod_without_nccl_on_gpus_names_what_its_build_needs(
    absent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support import gpus  # imports TensorFlow, which the other tests do not need

    gpus.install(monkeypatch, 2, None)
    monkeypatch.setattr(requirements, "missing_for_gpu", lambda wanted: absent)
    results = {check.name: check for check in processes._horovod(OPEN_MPI)}
    check = results["Horovod's operations"]
    assert check.state == "missing"
    assert check.fix.startswith("HOROVOD_GPU_OPERATIONS=NCCL ")
    assert ("needs nvcc (the CUDA compiler) first" in check.fix) == bool(absent)
    assert ("libnccl-dev" in check.fix) == bool(absent)


@pytest.mark.usefixtures("horovod")
@pytest.mark.parametrize(("version", "known"), [("4.1.4", True), ("5.0.11", False)])
def test_horovodrun_that_mpirun_does_not_understand(version: str, known: bool) -> None:
    results = {
        check.name: check for check in processes._horovod(OPEN_MPI._replace(version=version))
    }
    assert ("horovodrun" not in results) == known
    assert known or "--via horovodrun" in results["horovodrun"].fix


@pytest.mark.parametrize(
    ("kind", "loaded", "states"),
    [
        ("Open MPI", "libmpi.so.40", []),
        ("Intel MPI", "libmpi.so.12", []),
        ("MPICH", "libmpi.so.40.30", ["wrong"]),
        ("Open MPI", "libmpi.so.12", ["wrong"]),
    ],
)
def test_mpirun_of_another_mpi_is_red(
    kind: str, loaded: str, states: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_loaded_libraries", lambda: f"7f00 r-xp /usr/lib/{loaded}\n")
    result = processes._mismatch(OPEN_MPI._replace(kind=kind))
    assert [check.state for check in result] == states


def test_contradictory_cluster_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": 3}')
    (check,) = processes._cluster()
    assert check.state == "wrong"
    assert "TF_CONFIG" in check.value


def test_loopback_listens() -> None:
    assert host._port("loopback", "127.0.0.1").state == "ok"


def test_address_of_another_host_is_red() -> None:
    check = host._port("host address", "192.0.2.77")  # reserved for documentation
    assert check.state == "wrong"
    assert check.value.startswith("192.0.2.77: ")
    assert check.fix


def test_little_memory_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = host.psutil.virtual_memory()._replace(available=10**8)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: memory)
    assert host._memory().state == "wrong"


def test_reports_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = host.shutil.disk_usage("/")._replace(free=64 * 1024**2)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: usage)
    (check,) = host._shared_memory()
    assert check.state == "missing"
    assert "--shm-size" in check.fix
