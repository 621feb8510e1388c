"""The doctor's lines on GPUs and the libraries that TensorFlow needs for them."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import tensorflow as tf

from tests.support import gpus
from tfdist.tools.doctor import devices
from tfdist.tools.doctor.report import Check


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a TensorFlow that was built for CUDA."""
    build = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def lines() -> dict[str, Check]:
    return {check.name: check for check in devices.checks()}


def test_host_without_gpus_passes() -> None:
    assert lines()["GPUs"].state == "ok"


@pytest.mark.usefixtures("cuda")
def test_libraries_are_not_needed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.gpus, "facts", lambda fields: [])
    monkeypatch.setattr(devices, "LIBRARIES", {"CUDA driver": "no.so.1", "C library": "libc.so.6"})
    found = lines()
    assert found["CUDA of TensorFlow"].value == "12.5.1 with cuDNN 9"
    assert {name for name, check in found.items() if check.state != "ok"} == {"CUDA libraries"}
    assert found["CUDA libraries"].state == "missing"  # neither passed nor failed
    assert "not found: CUDA driver (no.so.1) (needed only" in found["CUDA libraries"].value


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("number", "state"), [(90300, "missing"), (91002, "ok"), (92800, "ok")])
def test_old_cudnn_is_named(number: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = types.SimpleNamespace(cudnnGetVersion=lambda: number)
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda file: cudnn)
    check = lines()["cuDNN (libcudnn.so.9)"]
    assert check.value.startswith(f"9.{number // 100 % 100}.{number % 100} ")
    assert check.state == state
    assert ("nvidia-cudnn-cu12>=9.10" in check.fix) == (state == "missing")


@pytest.mark.usefixtures("cuda")
def test_gpu_that_tensorflow_does_not_see_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.gpus, "facts", lambda fields: ["NVIDIA H100, 550"])
    found = lines()
    assert found["GPUs"].value == "TensorFlow sees 0 of the 1 that the driver lists"
    assert found["GPUs"].fix == "pip install 'tensorflow[and-cuda]'"
    assert found["cuDNN (libcudnn.so.9)"].state == "wrong"
    assert found["cuDNN (libcudnn.so.9)"].fix == "pip install 'tensorflow[and-cuda]'"
    assert found["CUDA driver (libcuda.so.1)"].fix.startswith("install NVIDIA's driver")


def test_gpu_under_a_build_for_cpus_needs_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    build = {"is_cuda_build": False}
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices.gpus, "facts", lambda fields: ["NVIDIA H100, 550"])
    assert lines()["GPUs"].fix.startswith("pip uninstall -y tensorflow-cpu")


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("number", [1, 2, 4, 8])
@pytest.mark.parametrize("visible", [None, "0", "3,1", "1,-1,0", "", "GPU-6f1a,GPU-77c2"])
def test_hidden_gpus_are_not_reported(
    number: int, visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = gpus.install(monkeypatch, number, visible)
    monkeypatch.setattr(devices.gpus, "facts", lambda fields: ["NVIDIA A100, 550"] * number)
    check = lines()["GPUs"]
    if seen:
        assert check == Check("GPUs", ", ".join(f"GPU:{i} NVIDIA A100" for i in range(seen)))
    else:
        assert check.value == f"CUDA_VISIBLE_DEVICES={visible} hides all of them"
        assert check.fix == "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.usefixtures("cuda")
def test_visible_gpu_that_tensorflow_does_not_see_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.install(monkeypatch, 1, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setattr(devices.gpus, "facts", lambda fields: ["NVIDIA A100, 550"] * 8)
    assert lines()["GPUs"].value == "TensorFlow sees 1 of the 2 that the driver lists"


@pytest.mark.usefixtures("cuda")
def test_new_gpu_has_a_line_on_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    build = {"is_cuda_build": True, "cuda_compute_capabilities": ["sm_80", "compute_90"]}
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
    gpus.install(monkeypatch, 2, None, capability=(9, 0))
    assert lines()["kernels for compute capability 9.0"].state == "missing"


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("flags", "variable", "is_named"),
    [
        ("avx2 avx512_vnni", "1", True),
        ("avx2 avx512_vnni avx512_fp16", "1", False),
        ("avx2", "1", False),
        ("avx2 avx512_vnni", "0", False),
    ],
)
def test_onednn_that_keeps_gpus_from_fusing_is_named(
    flags: str, variable: str, is_named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus.install(monkeypatch, 1, None)
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(devices, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", variable)
    assert ("fusions in float16" in lines()) == is_named
