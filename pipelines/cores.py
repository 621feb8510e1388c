"""The number of CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS, _OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def num_cores() -> int:
    """Returns the number of cores that this process may use, at least 1.

    It is the smallest of these: the cores that the process is bound to (`taskset`, a scheduler's
    cpusets), the CPU time per second of its cgroups (a container's `--cpus`, a `CPUQuota` of
    systemd), and `OMP_NUM_THREADS`.
    """
    limits = [num_bound_cores(), *map(math.ceil, _quotas())]
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if threads.isdigit():
        limits.append(int(threads))
    return max(min(limits), 1)


def num_bound_cores(pid: int = 0) -> int:
    """Returns the number of cores that a process is bound to; all where systems do not bind any.

    Raises:
        OSError: Linux has no such process.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(pid))
    return os.cpu_count() or 1


def _quotas() -> Iterator[float]:
    """Yields the limits of this process's cgroups and their parents, in cores."""
    for folder in _cgroups():
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:  # version 1
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quota, period = ((folder / name).read_text().strip() for name in names)
            if quota.isdigit():  # else "max" or -1
                yield int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue


def _cgroups() -> Iterator[Path]:
    """Yields the folders of the cgroups that limit this process, and of their parents."""
    try:
        lines = _OF_PROCESS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / controllers
        folder = root / path.lstrip("/")
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(root)))
