"""Horovod for GPUs needs nvcc and NCCL's development files, which CUDA's wheels lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_mpi import program
from tfdist.errors import InstallError
from tfdist.tools.install_horovod import __main__, build, cuda, tools, versions


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A simulated host with only the programs and libraries in a folder, and a build for NCCL."""
    for variable in (
        *("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB"),
        *("HOROVOD_NCCL_LINK", "HOROVOD_GPU", "CUDACXX", "CUDAToolkit_ROOT", "CUDA_PATH"),
        *("CUDA_HOME", "NCCL_ROOT", "CONDA_PREFIX", "CMAKE_PREFIX_PATH", "CMAKE_LIBRARY_PATH"),
        "CMAKE_INCLUDE_PATH",
    ):
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "usr" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(tools, "search_path", lambda: str(folder))
    monkeypatch.setattr(cuda, "_TOOLKIT", str(tmp_path / "cuda"))
    monkeypatch.setattr(cuda, "_SYSTEM", ())
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    return tmp_path


def toolkit(folder: Path) -> None:
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    program(folder / "bin", "nvcc")


def nccl(folder: Path, library: str = "libnccl.so") -> None:
    for path in ("include/nccl.h", f"lib/{library}"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()


def test_cuda_wheels_are_insufficient(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl(host / "site-packages" / "nvidia" / "nccl", "libnccl.so.2")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(host / "site-packages" / "nvidia" / "nccl"))
    with pytest.raises(InstallError) as raised:
        cuda.check()
    message = str(raised.value)
    assert "HOROVOD_GPU_OPERATIONS=NCCL needs nvcc" in message
    assert "libnccl_static.a or libnccl.so" in message
    assert "nccl.h" not in message
    assert "apt-get install cuda-nvcc-12-5 cuda-cudart-dev-12-5 libnccl-dev" in message


def test_suggests_packages_for_the_cuda_version_of_tensorflow() -> None:
    import tensorflow as tf

    version = tf.sysconfig.get_build_info().get("cuda_version", "12.5")
    assert "-".join(version.split(".")[:2]) == cuda.CUDA


@pytest.mark.parametrize("variables", [{"HOROVOD_GPU_OPERATIONS": ""}, {"HOROVOD_GPU": "ROCM"}])
def test_build_without_cuda_needs_nothing(
    variables: dict[str, str], host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cuda.missing() == []
    assert cuda.settings() == []


def test_mpi_operations_need_the_compiler_alone(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "MPI")
    assert cuda.missing() == ["nvcc (the CUDA compiler)"]
    toolkit(host / "usr")
    cuda.check()


def test_one_operation_alone_needs_nccl(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "")
    monkeypatch.setenv("HOROVOD_GPU_ALLREDUCE", "NCCL")
    toolkit(host / "usr")
    with pytest.raises(InstallError, match=r"HOROVOD_GPU_ALLREDUCE=NCCL needs nccl\.h"):
        cuda.check()


@pytest.mark.parametrize("library", ["libnccl.so", "libnccl_static.a"])
def test_development_packages_of_the_system(library: str, host: Path) -> None:
    toolkit(host / "usr")
    nccl(host / "usr", library)
    cuda.check()
    assert cuda.home_to_set() is None  # CMake finds it on PATH


@pytest.mark.parametrize(
    ("link", "library"), [("SHARED", "libnccl_static.a"), ("STATIC", "libnccl.so")]
)
def test_library_of_another_kind_is_ignored(
    link: str, library: str, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit(host / "usr")
    nccl(host / "usr", library)
    monkeypatch.setenv("HOROVOD_NCCL_LINK", link)
    assert cuda.nccl_library() is None


@pytest.mark.parametrize("variable", ["HOROVOD_CUDA_HOME", "CUDAToolkit_ROOT", "CUDA_PATH"])
def test_toolkit_from_environment_variable(
    variable: str, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit(host / "opt")
    nccl(host / "opt")  # as NVIDIA's HPC SDK and conda do
    assert cuda.missing()
    monkeypatch.setenv(variable, str(host / "opt"))
    cuda.check()
    assert cuda.nvcc() == host / "opt" / "bin" / "nvcc"


def test_named_toolkit_without_a_compiler_raises(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit(host / "usr")
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(host / "empty"))
    assert cuda.nvcc() is None  # Horovod's CMakeLists.txt uses no other nvcc


def test_toolkit_off_the_path_is_passed_to_the_build(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit(host / "cuda")
    environ = build._environment(Path("tools"), with_mpi=False)
    assert environ["HOROVOD_CUDA_HOME"] == str(host / "cuda")
    monkeypatch.setenv("HOROVOD_CUDA_HOME", "/mine")
    assert build._environment(Path("tools"), with_mpi=False)["HOROVOD_CUDA_HOME"] == "/mine"


@pytest.mark.parametrize(
    "variable",
    ["CUDACXX", "CUDAToolkit_ROOT", "CUDA_PATH", "CUDAARCHS", "NCCL_ROOT", "CMAKE_PREFIX_PATH"],
)
def test_each_toolkit_has_its_own_wheel(
    variable: str, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = __main__._cache_folder("2.21.0", None)
    monkeypatch.setenv(variable, str(host / "other"))
    assert __main__._cache_folder("2.21.0", None) != before


def test_another_compiler_on_the_path_has_its_own_wheel(host: Path) -> None:
    before = __main__._cache_folder("2.21.0", None)
    toolkit(host / "usr")
    assert __main__._cache_folder("2.21.0", None) != before


def test_failed_check_prevents_the_build(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(host))
    monkeypatch.setattr(build, "wheel", lambda *_, **__: pytest.fail("started to build"))
    monkeypatch.setattr(tools, "check_compiler", lambda: None)
    # A Horovod for CPUs is installed, which does not satisfy a request for NCCL.
    monkeypatch.setattr(versions, "horovod_fits", lambda: True)
    with pytest.raises(InstallError, match="needs nvcc"):
        __main__.install(mpi="none")
