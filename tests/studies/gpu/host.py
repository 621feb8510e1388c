"""The devices that the checks run on."""

from __future__ import annotations

import dataclasses
import os

from tfdist.cluster import gpus

#: Logical CPU devices of a rehearsal.
REHEARSAL_DEVICES = 2


@dataclasses.dataclass(frozen=True)
class Host:
    """The devices of a run of the checks.

    Attributes:
        num_devices: GPUs, or logical CPU devices in a rehearsal.
        rehearsal: Whether CPU devices are used in place of GPUs, with tiny networks.
        visible: `CUDA_VISIBLE_DEVICES` for the checks.
    """

    num_devices: int
    rehearsal: bool
    visible: str

    @classmethod
    def rehearsing(cls, num_devices: int = REHEARSAL_DEVICES) -> Host:
        """Returns a host of logical CPU devices."""
        return cls(num_devices, rehearsal=True, visible="-1")

    @classmethod
    def here(cls) -> Host:
        """Returns the GPUs that this process may use; none without a driver.

        An empty `CUDA_VISIBLE_DEVICES` counts as not set: the tests set it to hide GPUs.
        """
        installed = gpus.installed()
        chosen = gpus.visible(os.environ) if os.environ.get(gpus.VISIBLE) else None
        visible = [str(i) for i in range(len(installed))] if chosen is None else chosen
        number = min(len(visible), len(installed)) if installed else 0
        return cls(number, rehearsal=False, visible=",".join(visible) or "-1")

    def environ(self, full_float32: bool) -> dict[str, str]:
        """Returns the environment of a check.

        Args:
            full_float32: Whether to multiply float32 without TF32, for comparisons of numbers.
        """
        environ = {
            **os.environ,
            gpus.VISIBLE: self.visible,
            # Several processes of a check may share a GPU.
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
            # Kernels that the driver compiles for new GPUs are kept for the next check.
            "CUDA_CACHE_MAXSIZE": os.environ.get("CUDA_CACHE_MAXSIZE", str(4 * 1024**3)),
        }
        if full_float32:
            environ["NVIDIA_TF32_OVERRIDE"] = "0"
        return environ
