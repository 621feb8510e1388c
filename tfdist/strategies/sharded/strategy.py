"""Sharded: data parallelism in which each device or process keeps its part of the state."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist import cluster
from tfdist.strategies.base import Strategy
from tfdist.strategies.sharded.over_devices import ShardedOverDevices
from tfdist.strategies.sharded.over_processes import ShardedOverProcesses


def Sharded(  # noqa: N802 - which class it is follows from how the program was started
    devices: int | str | Sequence[str] | None = None,
    shard: str = "parameters",
    smallest: int = 1024,
    offload: str = "none",
) -> Strategy:
    """Returns a strategy of synchronous replicas, each the owner of a part of the state.

    Over the processes that a launcher started, one replica in each; of one process, over its
    devices.

    Args:
        devices: As `tfdist.devices.resolve` takes them; one replica, and one part, on each. Of
            several processes: the device of this one.
        shard: What is divided: `"optimizer"`: its state (ZeRO 1); `"gradients"`: that, and the
            sums of gradients (ZeRO 2); `"parameters"`: those, and the weights (ZeRO 3), which are
            gathered where they are read.
        smallest: Elements of a weight below which it is not cut.
        offload: `"optimizer"`: the parts, of weights and of what the optimizer keeps about them,
            are in the host's memory, and updated by its processor, in the manner of ZeRO-Offload
            (Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training").

    Raises:
        ConfigurationError: Another `shard` or `offload`; or several devices in several processes.
        DeviceError: A device that does not exist.
        MissingError: Several processes, and Horovod is not installed.
    """
    several = cluster.started_together() is not None
    strategy = ShardedOverProcesses if several else ShardedOverDevices
    return strategy(devices, shard, smallest, offload)
