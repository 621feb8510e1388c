"""Wheels of Horovod are built once for each TensorFlow, MPI and set of variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfdist.cluster.mpi_library import Mpi
from tfdist.errors import InstallError
from tfdist.tools.install_horovod import build, cuda, install, tools, versions

OPEN_MPI = Mpi("Open MPI", "4.1.4", "/usr/bin/mpirun", "/usr/bin/mpicxx")


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders into which wheels are built; nothing is compiled or installed."""
    folders = []

    def wheel(folder: Path, with_mpi: bool) -> None:
        folders.append(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "horovod-0.28.1-any.whl").touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "wheel", wheel)
    monkeypatch.setattr(tools, "check_compiler", lambda: None)
    monkeypatch.setattr(cuda, "check", lambda: None)
    monkeypatch.setattr(tools, "choose_mpi", lambda _: OPEN_MPI)
    monkeypatch.setattr(tools, "pip", lambda *_: None)
    monkeypatch.setattr(versions, "tensorflow", lambda: "2.21.0")
    monkeypatch.setattr(versions, "horovod_fits", lambda: False)
    return folders


def test_second_environment_reuses_the_cached_wheel(builds: list[Path]) -> None:
    install.install()
    install.install()
    assert len(builds) == 1
    install.install(rebuild=True)
    assert builds[1] == builds[0]


def test_each_tensorflow_has_its_own_wheel(
    builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install.install()
    monkeypatch.setattr(versions, "tensorflow", lambda: "2.21.1")
    install.install()
    assert len(set(builds)) == 2


@pytest.mark.parametrize(
    "other",
    [
        None,
        OPEN_MPI._replace(kind="MPICH"),
        OPEN_MPI._replace(version="5.0.11"),
        OPEN_MPI._replace(mpirun="/opt/bin/mpirun", compiler="/opt/bin/mpicxx"),
    ],
)
def test_each_mpi_has_its_own_wheel(
    other: Mpi | None, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install.install()
    monkeypatch.setattr(tools, "choose_mpi", lambda _: other)
    install.install()
    assert len(set(builds)) == 2


def test_build_variables_have_their_own_wheel(
    builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install.install()
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    install.install()
    assert len(set(builds)) == 2


def test_compatible_installation_is_kept(
    builds: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "horovod_fits", lambda: True)
    install.install()
    assert not builds
    assert "already installed" in capsys.readouterr().out


@pytest.mark.usefixtures("builds")
def test_missing_tensorflow_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "tensorflow", lambda: None)
    with pytest.raises(InstallError, match="pip install tensorflow"):
        install.install()
