"""What TensorFlow computes on, and the libraries of CUDA that it loads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tfdist.doctor.check import Check

#: The libraries of CUDA 12 that TensorFlow loads by name: what breaks without them is in the name.
LIBRARIES = {
    "CUDA driver": "libcuda.so.1",
    "CUDA runtime": "libcudart.so.12",
    "cuBLAS": "libcublas.so.12",
    "cuFFT": "libcufft.so.11",
    "cuSOLVER": "libcusolver.so.11",
    "cuSPARSE": "libcusparse.so.12",
    "cuDNN": "libcudnn.so.9",
    "NCCL": "libnccl.so.2",
}

_CURE_DRIVER = "install NVIDIA's driver; in a container: run it with --gpus all"
_CURE_LIBRARIES = "pip install 'tensorflow[and-cuda]'"
_CURE_BUILD = f"pip uninstall -y tensorflow-cpu; {_CURE_LIBRARIES}"


def checks() -> list[Check]:
    """Returns the devices and, where TensorFlow was built for CUDA, its libraries."""
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    seen, driven = tf.config.list_physical_devices("GPU"), gpus_of_driver()
    lines = [
        Check("CPUs", f"{len(tf.config.list_physical_devices('CPU'))} device"),
        _gpus([_describe(tf, gpu) for gpu in seen], driven, build["is_cuda_build"]),
    ]
    if not build["is_cuda_build"]:
        return [*lines, Check("CUDA", "TensorFlow was built without it")]
    made_for = f"{build.get('cuda_version', '?')} with cuDNN {build.get('cudnn_version', '?')}"
    lines.append(Check("CUDA of TensorFlow", made_for))
    return lines + _libraries(needed=bool(driven))


def gpus_of_driver() -> list[str]:
    """Returns the GPUs that NVIDIA's driver lists; none where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _gpus(seen: list[str], driven: list[str], cuda_build: bool) -> Check:
    """Whether TensorFlow sees the GPUs that the driver does."""
    if len(seen) < len(driven):
        value = f"TensorFlow sees {len(seen)} of the {len(driven)} that the driver lists"
        return Check("GPUs", value, "wrong", _CURE_LIBRARIES if cuda_build else _CURE_BUILD)
    return Check("GPUs", ", ".join(seen) or "none: logical CPU devices stand in for them")


def _describe(tf: Any, gpu: Any) -> str:
    details = tf.config.experimental.get_device_details(gpu)
    return f"{gpu.name.rpartition('physical_device:')[2]} {details.get('device_name', '')}".strip()


def _libraries(needed: bool) -> list[Check]:
    """A line for each library; those that are not found share one where no GPU needs them."""
    lines = [_library(name, file) for name, file in LIBRARIES.items()]
    absent = [line.name for line in lines if line.state == "wrong"]
    if needed or not absent:
        return lines
    value = f"not found: {', '.join(absent)}; without a GPU nothing needs them"
    shared = Check("CUDA libraries", value, "missing", f"for a GPU: {_CURE_LIBRARIES}")
    return [line for line in lines if line.state == "ok"] + [shared]


def _library(name: str, file: str) -> Check:
    """Looks for a library where TensorFlow does: in NVIDIA's wheels, then in the system."""
    name = f"{name} ({file})"
    if where := _in_wheels(file):
        return Check(name, str(where))
    try:
        ctypes.CDLL(file)
    except OSError:
        driver = file == LIBRARIES["CUDA driver"]
        return Check(name, "not found", "wrong", _CURE_DRIVER if driver else _CURE_LIBRARIES)
    return Check(name, "found by the system's loader")


def _in_wheels(file: str) -> Path | None:
    import tensorflow as tf

    packages = Path(tf.sysconfig.get_lib()).parent
    return next((packages / "nvidia").glob(f"*/lib/{file}"), None)
