"""Whether TensorFlow has machine code for the GPUs of this host, or the driver has to compile it.

A wheel of TensorFlow contains machine code for some generations of GPUs (`sm_80`: compute
capability 8.0 and later ones of generation 8) and PTX, an intermediate form, for later generations
(`compute_90`). The driver compiles PTX when a kernel is first used. TensorFlow says of that: "CUDA
kernels will be jit-compiled from PTX, which could take 30 minutes or longer". The driver keeps the
results in a cache, of 1 GiB by default, from which the oldest are removed when it is full.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.doctor.check import Check

#: Size of the driver's cache, in bytes, that is taken to hold all kernels; the maximum is 4 GiB.
_LARGE_CACHE = 2 * 1024**3

_CURE_CACHE = (
    "export CUDA_CACHE_MAXSIZE=4294967296 and, if the home folder is not kept (in a container), "
    "CUDA_CACHE_PATH to a folder that is; then let a first run finish, once per host"
)

Capability = tuple[int, int]


def checks(gpus: Sequence[Mapping[str, Any]], built_for: Sequence[str]) -> list[Check]:
    """Return a line for each compute capability among the GPUs.

    Args:
        gpus: Descriptions as `tf.config.experimental.get_device_details` has them.
        built_for: `cuda_compute_capabilities` of TensorFlow's build, such as `["sm_80",
            "compute_90"]`; with an empty list nothing is known and nothing is returned.
    """
    found = {gpu["compute_capability"] for gpu in gpus if "compute_capability" in gpu}
    return [_line(capability, built_for) for capability in sorted(found)] if built_for else []


def _line(gpu: Capability, built_for: Sequence[str]) -> Check:
    name = f"kernels for compute capability {gpu[0]}.{gpu[1]}"
    machine_code = [_capability(one) for one in built_for if one.startswith("sm_")]
    ptx = [_capability(one) for one in built_for if one.startswith("compute_")]
    if any(major == gpu[0] and minor <= gpu[1] for major, minor in machine_code):
        return Check(name, "TensorFlow brings machine code")
    if not any(one <= gpu for one in ptx):
        value = f"TensorFlow brings none: it was built for {', '.join(built_for)}"
        cure = "install a build of TensorFlow for this GPU, or set CUDA_VISIBLE_DEVICES to others"
        return Check(name, value, "wrong", cure)
    value = "only PTX: the driver compiles kernels at the first start, which can take many minutes"
    if os.environ.get("CUDA_CACHE_DISABLE") == "1":
        value = f"{value}, and at each start, because CUDA_CACHE_DISABLE=1"
        return Check(name, value, "missing", f"unset CUDA_CACHE_DISABLE; {_CURE_CACHE}")
    if _cache_bytes() < _LARGE_CACHE:
        return Check(name, value, "missing", _CURE_CACHE)
    return Check(name, f"{value}; a large cache keeps them for the next start")


def _capability(built_for: str) -> Capability:
    """Return the numbers of `"sm_89"` or `"compute_90"`, also of `"sm_90a"` and `"sm_120"`."""
    digits = "".join(filter(str.isdecimal, built_for.partition("_")[2]))
    return int(digits[:-1]), int(digits[-1])


def _cache_bytes() -> int:
    """Return the size of the driver's cache as it is set; 0 for the default."""
    size = os.environ.get("CUDA_CACHE_MAXSIZE", "")
    return int(size) if size.isdecimal() else 0
