"""Information about the machine, which is stored with every measurement."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

import tfdist
from pipelines.cores import num_bound_cores


def facts() -> dict[str, Any]:
    """Returns processor, memory, accelerators and versions. Initializes TensorFlow."""
    import keras
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return {
        "processor": _processor(),
        "cores": num_bound_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": [detail.get("device_name", "unknown") for detail in details],
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "tfdist": tfdist.__version__,
        },
    }


@contextmanager
def on_cores(cores: Iterable[int]) -> Iterator[None]:
    """Restricts this thread, and the threads and processes that it starts, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class OtherLoad:
    """Measures the processor time of processes other than this one and its children."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began = time.perf_counter()
        self._all, self._own = _busy_seconds(), self._own_seconds()

    def fraction(self) -> float:
        """Returns the fraction of all cores' time that other processes used since the start."""
        seconds = time.perf_counter() - self._began
        others = (_busy_seconds() - self._all) - (self._own_seconds() - self._own)
        return round(min(1.0, max(0.0, others / (seconds * (psutil.cpu_count() or 1)))), 3)

    def _own_seconds(self) -> float:
        processes = [self._process, *self._process.children(recursive=True)]
        # `cpu_times` of a process includes its ended children.
        return sum(sum(process.cpu_times()[:4]) for process in processes)


def _busy_seconds() -> float:
    """Returns the total non-idle seconds of all cores since boot."""
    times = psutil.cpu_times()
    # `user` includes the time of guests. `steal` is the time of other virtual machines.
    others = ("iowait", "guest", "guest_nice")  # of Linux
    return sum(times) - times.idle - sum(getattr(times, name, 0.0) for name in others)


def _processor() -> str:
    """Returns the processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
