"""Checks whether TensorFlow includes machine code for the GPUs of this host.

A wheel of TensorFlow contains machine code for some generations of GPUs (`sm_80`: compute
capability 8.0 and later ones of generation 8) and PTX, an intermediate form, for later generations
(`compute_90`). The driver compiles PTX when a kernel is first used. TensorFlow warns: "CUDA
kernels will be jit-compiled from PTX, which could take 30 minutes or longer". The driver keeps the
results in a cache, of 1 GiB by default, from which the oldest are removed when it is full.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.tools.doctor.report import Check

#: Bytes of the driver's cache that are assumed to suffice for all kernels. The maximum is 4 GiB.
_LARGE_CACHE = 2 * 1024**3

_FIX_CACHE = (
    "export CUDA_CACHE_MAXSIZE=4294967296; if the home folder is not persistent (a container), "
    "also set CUDA_CACHE_PATH to a folder that is; then run once per host to fill the cache"
)

Capability = tuple[int, int]


def checks(gpus: Sequence[Mapping[str, Any]], built_for: Sequence[str]) -> list[Check]:
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
    if _cache_bytes() < _LARGE_CACHE:
        return Check(name, value, "missing", _FIX_CACHE)
    return Check(name, f"{value}; a large cache keeps them for the next start")


def _capability(built_for: str) -> Capability:
    """Parses names such as `"sm_89"`, `"compute_90"`, `"sm_90a"` and `"sm_120"`."""
    digits = "".join(filter(str.isdecimal, built_for.partition("_")[2]))
    return int(digits[:-1]), int(digits[-1])


def _cache_bytes() -> int:
    """Returns the configured size of the driver's cache; 0 if it is the default."""
    size = os.environ.get("CUDA_CACHE_MAXSIZE", "")
    return int(size) if size.isdecimal() else 0
