"""The doctor's lines on kernels: machine code, or PTX that the driver compiles first."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.tools.doctor import devices
from tfdist.tools.doctor.report import Check

BUILT_FOR = ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]


@pytest.fixture(autouse=True)
def default_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_CACHE_MAXSIZE", raising=False)
    monkeypatch.delenv("CUDA_CACHE_DISABLE", raising=False)


def line(capability: tuple[int, int], built_for: list[str] = BUILT_FOR) -> Check:
    (found,) = devices.kernel_checks([{"compute_capability": capability}], built_for)
    return found


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9)])
def test_machine_code_of_an_earlier_minor_version_runs(capability: tuple[int, int]) -> None:
    assert line(capability).state == "ok"


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_ptx_alone_is_yellow_with_the_cache_to_set(capability: tuple[int, int]) -> None:
    result = line(capability)
    assert result.state == "missing"
    assert result.name == f"kernels for compute capability {capability[0]}.{capability[1]}"
    assert "first start, which can take many minutes" in result.value
    assert "CUDA_CACHE_MAXSIZE=4294967296" in result.fix
    assert "CUDA_CACHE_PATH" in result.fix


def test_cache_size_determines_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_CACHE_MAXSIZE", "4294967296")
    assert line((9, 0)).state == "ok"
    monkeypatch.setenv("CUDA_CACHE_MAXSIZE", "268435456")
    assert line((9, 0)).state == "missing"


def test_disabled_cache_compiles_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_CACHE_MAXSIZE", "4294967296")
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    assert "at each start" in line((9, 0)).value
    assert line((9, 0)).fix.startswith("unset CUDA_CACHE_DISABLE")


def test_gpu_without_kernels_fails() -> None:
    assert line((5, 2)).state == "wrong"
    assert "built for sm_60, sm_70" in line((5, 2)).value


def test_machine_code_of_a_later_build() -> None:
    assert line((9, 0), ["sm_80", "sm_90a", "compute_100"]).state == "ok"
    assert line((12, 0), ["sm_80", "sm_120"]).state == "ok"


def test_equal_gpus_share_a_line() -> None:
    gpus = [{"compute_capability": (8, 0)}] * 8 + [{"compute_capability": (9, 0)}]
    assert len(devices.kernel_checks(gpus, BUILT_FOR)) == 2
    assert devices.kernel_checks([{}], BUILT_FOR) == []  # TensorFlow does not know the capability
    assert devices.kernel_checks(gpus, []) == []


def test_installed_wheel_says_what_it_was_built_for() -> None:
    built_for = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", BUILT_FOR)
    assert all(devices._capability(one) >= (3, 5) for one in built_for)
