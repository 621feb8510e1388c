"""The devices that TensorFlow sees, and the CUDA libraries that it loads."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from tfdist.cluster import gpus
from tfdist.tools.doctor import gpu_kernels
from tfdist.tools.doctor.report import Check

#: The libraries of CUDA 12 that TensorFlow loads by name.
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

_CPU_INFO = Path("/proc/cpuinfo")
#: From this version of cuDNN on, there are kernels for Hopper that wheels of PyTorch use, too.
_RECENT_CUDNN = (9, 10)

_FIX_DRIVER = "install NVIDIA's driver; in a container: run it with --gpus all"
_FIX_LIBRARIES = "pip install 'tensorflow[and-cuda]'"
_FIX_BUILD = f"pip uninstall -y tensorflow-cpu; {_FIX_LIBRARIES}"


def checks() -> list[Check]:
    """Returns checks of the devices and, if TensorFlow was built for CUDA, of its libraries."""
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    details = list(map(_details, tf.config.list_physical_devices("GPU")))
    driver_gpus = _visible(gpus.facts("name,driver_version"))
    lines = [
        Check("CPUs", f"{len(tf.config.list_physical_devices('CPU'))} device"),
        _gpus([f"{gpu['name']} {gpu['device_name']}" for gpu in details], driver_gpus, build),
    ]
    if not build["is_cuda_build"]:
        return [*lines, Check("CUDA", "this build of TensorFlow does not support it")]
    lines += gpu_kernels.checks(details, build.get("cuda_compute_capabilities", []))
    cuda_versions = f"{build.get('cuda_version', '?')} with cuDNN {build.get('cudnn_version', '?')}"
    lines.append(Check("CUDA of TensorFlow", cuda_versions))
    if details and _onednn_skips_float16():
        value = "off: oneDNN is on, and this processor has no float16 arithmetic"
        fix = "export TF_ENABLE_ONEDNN_OPTS=0"
        lines.append(Check("fusions in float16", value, "missing", fix))
    return lines + _libraries(needed=bool(driver_gpus))


def _onednn_skips_float16() -> bool:
    """Whether TensorFlow's Grappler leaves operations in float16 unfused, also those on GPUs.

    It does where oneDNN is on, by default with VNNI, and the processor cannot compute in float16.
    """
    if os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0" or not _CPU_INFO.exists():
        return False
    flags = set(_CPU_INFO.read_text().split())
    return not flags.isdisjoint({"avx512_vnni", "avx_vnni"}) and "avx512_fp16" not in flags


def _visible(installed: list[str]) -> list[str]:
    """Returns the driver's GPUs that `CUDA_VISIBLE_DEVICES` makes visible.

    nvidia-smi ignores the variable. An entry that is not a number is a UUID of a GPU or a MIG
    instance.
    """
    entries = gpus.visible(os.environ)
    if entries is None:
        return installed
    visible = []
    for entry in entries if installed else ():
        if entry.isdecimal() and int(entry) >= len(installed):
            break  # CUDA ignores this entry and the ones after it
        visible.append(installed[int(entry)] if entry.isdecimal() else entry)
    return visible


def _gpus(seen: list[str], driver_gpus: list[str], build: dict[str, Any]) -> Check:
    """Checks that TensorFlow sees all GPUs that the driver lists for this process."""
    if len(seen) < len(driver_gpus):
        value = f"TensorFlow sees {len(seen)} of the {len(driver_gpus)} that the driver lists"
        return Check(
            "GPUs", value, "wrong", _FIX_LIBRARIES if build["is_cuda_build"] else _FIX_BUILD
        )
    if seen:
        return Check("GPUs", ", ".join(seen))
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None and gpus.facts("name,driver_version"):
        value = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides all of them"
        return Check("GPUs", value, "missing", "unset CUDA_VISIBLE_DEVICES")
    return Check("GPUs", "none: replicas run on logical CPU devices")


def _details(gpu: Any) -> dict[str, Any]:
    """Returns TensorFlow's description of a GPU, with its name such as `"GPU:0"`."""
    import tensorflow as tf

    details = tf.config.experimental.get_device_details(gpu)
    return {"device_name": "", **details, "name": gpu.name.rpartition("physical_device:")[2]}


def _libraries(needed: bool) -> list[Check]:
    """Returns a check per library; without a GPU, one for all libraries that were not found."""
    lines = [_library(name, file) for name, file in LIBRARIES.items()]
    absent = [line.name for line in lines if line.state == "wrong"]
    if needed or not absent:
        return lines
    value = f"not found: {', '.join(absent)} (needed only for GPUs)"
    shared = Check("CUDA libraries", value, "missing", f"for a GPU: {_FIX_LIBRARIES}")
    return [line for line in lines if line.state == "ok"] + [shared]


def _library(name: str, file: str) -> Check:
    """Searches for a library where TensorFlow does: in NVIDIA's wheels, then in the system."""
    title, where = f"{name} ({file})", _in_wheels(file)
    try:
        version = _version(ctypes.CDLL(str(where or file)))
    except OSError:
        if where:
            return Check(title, str(where))
        driver = file == LIBRARIES["CUDA driver"]
        return Check(title, "not found", "wrong", _FIX_DRIVER if driver else _FIX_LIBRARIES)
    value = f"{'.'.join(map(str, version))} {where or 'found by the system loader'}".strip()
    if name == "cuDNN" and version < _RECENT_CUDNN:
        recent = ".".join(map(str, _RECENT_CUDNN))
        value += f": convolutions may be slower than with {recent} or later"
        return Check(title, value, "missing", f"pip install 'nvidia-cudnn-cu12>={recent}'")
    return Check(title, value)


def _version(library: ctypes.CDLL) -> tuple[int, ...]:
    """Returns the version of cuDNN or cuBLAS; empty for other libraries."""
    if hasattr(library, "cudnnGetVersion"):
        number = library.cudnnGetVersion()
        return number // 10_000, number // 100 % 100, number % 100
    if not hasattr(library, "cublasGetProperty"):
        return ()
    part, version = ctypes.c_int(), []
    for kind in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
        library.cublasGetProperty(kind, ctypes.byref(part))
        version.append(part.value)
    return tuple(version)


def _in_wheels(file: str) -> Path | None:
    import tensorflow as tf

    packages = Path(tf.sysconfig.get_lib()).parent
    return next((packages / "nvidia").glob(f"*/lib/{file}"), None)
