"""Joins this process to those that a launcher started, for strategies that take several devices."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist import cluster
from tfdist.devices import resolve
from tfdist.groups.base import LocalGroup, ProcessGroup
from tfdist.groups.collective import CollectiveGroup
from tfdist.groups.horovod import HorovodGroup, limit_visible_gpus


def join_processes(
    process_group: str, devices: int | str | Sequence[str] | None, default_cpus: int
) -> tuple[list[str], ProcessGroup]:
    """Returns the devices of this process, and the processes that train together.

    A process that no launcher started trains alone. With Horovod, the GPUs of a host are divided
    among its processes.

    Args:
        process_group: `"horovod"`, `"tensorflow"` (TensorFlow's collectives) or `"auto"`, which is
            Horovod.
        devices: As for `tfdist.devices.resolve`.
        default_cpus: As for `tfdist.devices.resolve`.

    Raises:
        DeviceError: A device that does not exist.
        MissingError: Horovod is not installed.
        ClusterError: The processes do not come together.
    """
    if cluster.started_together() is None:
        return resolve(devices, default_cpus), LocalGroup()
    if process_group == "tensorflow":
        joined = CollectiveGroup(devices, default_cpus=default_cpus)
        return joined.devices, joined
    group = HorovodGroup()
    limit_visible_gpus(group.local_rank, group.local_size)
    return resolve(devices, default_cpus), group
