"""The facts of the machine without which a time means nothing."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil

import tfdist


def facts() -> dict[str, Any]:
    """Returns processor, memory, accelerators and versions; starts TensorFlow."""
    import keras
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": [detail.get("device_name", "unknown") for detail in details],
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "tfdist": tfdist.__version__,
        },
    }


class OthersLoad:
    """Watches how much of the processor goes to others while this process and its own measure."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began = time.perf_counter()
        self._all, self._own = _busy_seconds(), self._own_seconds()

    def fraction(self) -> float:
        """Returns the fraction of all cores' time, 0 to 1, that others took since the start."""
        seconds = time.perf_counter() - self._began
        others = (_busy_seconds() - self._all) - (self._own_seconds() - self._own)
        return round(min(1.0, max(0.0, others / (seconds * (psutil.cpu_count() or 1)))), 3)

    def _own_seconds(self) -> float:
        own = [self._process, *self._process.children(recursive=True)]
        # Those that ended count with whoever waited for them.
        return sum(sum(one.cpu_times()[:4]) for one in own)


def _busy_seconds() -> float:
    """Seconds that all cores together were not idle since the machine started."""
    times = psutil.cpu_times()
    # Guests' time is counted in user already; a hypervisor's steal is somebody else's work.
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def _processor() -> str:
    """The processor's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
