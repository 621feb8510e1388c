"""The devices that TensorFlow sees, and the CUDA libraries that it loads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster import gpus
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
#: Bytes of the driver's cache that are assumed to suffice for all kernels. The maximum is 4 GiB.
_LARGE_CACHE = 2 * 1024**3

_FIX_CACHE = (
    "export CUDA_CACHE_MAXSIZE=4294967296; if the home folder is not persistent (a container), "
    "also set CUDA_CACHE_PATH to a folder that is; then run once per host to fill the cache"
)

Capability = tuple[int, int]


def checks() -> list[Check]:
    """Returns checks of the devices and, if TensorFlow was built for CUDA, of its libraries."""
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    details = list(map(_details, tf.config.list_physical_devices("GPU")))
    # nvidia-smi ignores CUDA_VISIBLE_DEVICES, of which an entry that is no number is a UUID of a
    # GPU or a MIG instance.
    installed = driver_gpus = gpus.facts("name,driver_version")
    entries = gpus.visible(os.environ)
    if entries is not None:
        driver_gpus = []
        for entry in entries if installed else ():
            if entry.isdecimal() and int(entry) >= len(installed):
                break  # CUDA ignores this entry and the ones after it
            driver_gpus.append(installed[int(entry)] if entry.isdecimal() else entry)
    lines = [
        Check("CPUs", f"{len(tf.config.list_physical_devices('CPU'))} device"),
        _gpus([f"{gpu['name']} {gpu['device_name']}" for gpu in details], driver_gpus, build),
    ]
    if not build["is_cuda_build"]:
        return [*lines, Check("CUDA", "this build of TensorFlow does not support it")]
    lines += kernel_checks(details, build.get("cuda_compute_capabilities", []))
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
    import tensorflow as tf

    packages = Path(tf.sysconfig.get_lib()).parent
    where = next((packages / "nvidia").glob(f"*/lib/{file}"), None)
    title = f"{name} ({file})"
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


def kernel_checks(gpus: Sequence[Mapping[str, Any]], built_for: Sequence[str]) -> list[Check]:
    """Returns a check for each compute capability among the GPUs.

    Args:
        gpus: Results of `tf.config.experimental.get_device_details`.
        built_for: `cuda_compute_capabilities` of TensorFlow's build, such as `["sm_80",
            "compute_90"]`; if it is empty, the result is empty.
    """
    capabilities = {gpu["compute_capability"] for gpu in gpus if "compute_capability" in gpu}
    return (
        [_line(capability, built_for) for capability in sorted(capabilities)] if built_for else []
    )


def _line(gpu: Capability, built_for: Sequence[str]) -> Check:
    name = f"kernels for compute capability {gpu[0]}.{gpu[1]}"
    machine_code = [_capability(one) for one in built_for if one.startswith("sm_")]
    ptx = [_capability(one) for one in built_for if one.startswith("compute_")]
    if any(major == gpu[0] and minor <= gpu[1] for major, minor in machine_code):
        return Check(name, "TensorFlow includes machine code")
    if not any(one <= gpu for one in ptx):
        value = f"not in TensorFlow, which was built for {', '.join(built_for)}"
        fix = "install a build of TensorFlow for this GPU, or hide it with CUDA_VISIBLE_DEVICES"
        return Check(name, value, "wrong", fix)
    value = "PTX only: the driver compiles kernels at the first start, which can take many minutes"
    if os.environ.get("CUDA_CACHE_DISABLE") == "1":
        value = f"{value}, and at each start, because CUDA_CACHE_DISABLE=1"
        return Check(name, value, "missing", f"unset CUDA_CACHE_DISABLE; {_FIX_CACHE}")
    size = os.environ.get("CUDA_CACHE_MAXSIZE", "")
    cache_bytes = int(size) if size.isdecimal() else 0
    if cache_bytes < _LARGE_CACHE:
        return Check(name, value, "missing", _FIX_CACHE)
    return Check(name, f"{value}; a large cache keeps them for the next start")


def _capability(built_for: str) -> Capability:
    """Parses names such as `"sm_89"`, `"compute_90"`, `"sm_90a"` and `"sm_120"`."""
    digits = "".join(filter(str.isdecimal, built_for.partition("_")[2]))
    return int(digits[:-1]), int(digits[-1])
