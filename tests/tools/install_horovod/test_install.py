"""Building and installing Horovod."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from tfdist.cluster.launcher.mpirun import Mpi
from tfdist.errors import InstallError
from tfdist.tools.install_horovod import __main__, build, requirements

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
    monkeypatch.setattr(requirements, "check_compiler", lambda: None)
    monkeypatch.setattr(requirements, "check_gpu", lambda: None)
    monkeypatch.setattr(requirements, "choose_mpi", lambda _: OPEN_MPI)
    monkeypatch.setattr(requirements, "pip", lambda *_: None)
    monkeypatch.setattr(requirements, "tensorflow_version", lambda: "2.21.0")
    monkeypatch.setattr(requirements, "horovod_fits", lambda: False)
    return folders


def test_second_environment_reuses_the_cached_wheel(builds: list[Path]) -> None:
    __main__.install()
    __main__.install()
    assert len(builds) == 1
    __main__.install(rebuild=True)
    assert builds[1] == builds[0]


def test_each_tensorflow_has_its_own_wheel(
    builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    __main__.install()
    monkeypatch.setattr(requirements, "tensorflow_version", lambda: "2.21.1")
    __main__.install()
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
    __main__.install()
    monkeypatch.setattr(requirements, "choose_mpi", lambda _: other)
    __main__.install()
    assert len(set(builds)) == 2


def test_build_variables_have_their_own_wheel(
    builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    __main__.install()
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    __main__.install()
    assert len(set(builds)) == 2


def test_compatible_installation_is_kept(
    builds: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requirements, "horovod_fits", lambda: True)
    __main__.install()
    assert not builds
    assert "already installed" in capsys.readouterr().out


@pytest.mark.usefixtures("builds")
def test_missing_tensorflow_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "tensorflow_version", lambda: None)
    with pytest.raises(InstallError, match="pip install tensorflow"):
        __main__.install()


#: Headers that Horovod 0.28.1 includes, and that TensorFlow's wheel lacks or has in another form.
INCLUDED = [
    "tf2xla/xla_op_kernel.h",
    "tf2xla/xla_op_registry.h",
    "xla/client/xla_builder.h",
    "xla/service/custom_call_target_registry.h",
    "xla/service/hlo.pb.h",
    "xla/shape.h",
    "xla/stream_executor/stream.h",
    "xla/xla_data.pb.h",
]


def test_provides_all_included_headers() -> None:
    folder = Path(build.__file__).parent / "include" / "tensorflow" / "compiler"
    results = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.h"))
    assert results == sorted(INCLUDED)


def test_provided_headers_precede_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPATH", "/opt/include")
    first, second = build._environment(Path("tools"), True)["CPATH"].split(os.pathsep)
    assert (Path(first, "tensorflow/compiler") / INCLUDED[0]).exists()
    assert second == "/opt/include"


@pytest.mark.parametrize("with_mpi", [True, False])
def test_build_includes_mpi_if_there_is_one(with_mpi: bool) -> None:
    environ = build._environment(Path("tools"), with_mpi)
    assert environ["HOROVOD_WITH_GLOO"] == "1"
    assert ("HOROVOD_WITH_MPI" in environ, "HOROVOD_WITHOUT_MPI" in environ) == (
        with_mpi,
        not with_mpi,
    )


def test_build_variables_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    monkeypatch.setenv("MAKEFLAGS", "-n")  # of a `make` that runs this test
    environ = build._environment(Path("tools"), True)
    assert environ["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environ["MAKEFLAGS"].startswith("-j")


def test_library_has_a_relative_rpath() -> None:
    relative = build._rpath().removeprefix(r"\$ORIGIN/")
    home = Path(sysconfig.get_path("platlib"), "horovod", "tensorflow")
    assert os.path.normpath(home / relative) == str(Path(sys.prefix, "lib"))


def test_failure_shows_the_first_errors(tmp_path: Path) -> None:
    prints = ["[ 50%] a.cc", "a.cc:1: error: no x.h", "noise"]
    program = "; ".join(f"print({line!r})" for line in prints) + "; raise SystemExit(1)"
    log = tmp_path / "build.log"
    with pytest.raises(InstallError) as raised:
        build._run([sys.executable, "-c", program], dict(os.environ), log)
    first, *errors = str(raised.value).splitlines()
    assert first == f"Building Horovod failed. The log is {log}. First errors:"
    assert errors == ["a.cc:1: error: no x.h"]
    assert log.read_text().splitlines() == prints
