"""Sharded data parallelism: each device or process keeps a shard of the training state.

In the manner of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"). Weights that their optimizer updates element by element are split into one shard
per owner. Others (tables of embeddings, matrices of Muon) stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist import cluster
from tfdist.errors import ConfigurationError
from tfdist.groups.base import ProcessGroup
from tfdist.groups.buckets import GradientExchange
from tfdist.groups.collective import CollectiveGroup
from tfdist.groups.fusion import by_device, local_sum
from tfdist.groups.horovod import HorovodGroup
from tfdist.strategies import STRATEGIES, mirrored_variables
from tfdist.strategies.base import ReplicaFn, Strategy, join_processes
from tfdist.strategies.horovod import device_of_rank
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.sharded.rank0_coordinator import coordinator_of
from tfdist.strategies.sharded.variables import DeviceShards, ProcessShards
from tfdist.strategies.towers import Towers


def Sharded(  # noqa: N802 - the class depends on how the program was started
    devices: int | str | Sequence[str] | None = None,
    shard: str = "parameters",
    smallest: int = 1024,
    offload: str = "none",
    process_group: str = "auto",
) -> Strategy:
    """Returns a strategy of synchronous replicas that each own a shard of the state.

    This is a function, because the class depends on where the shards are. In one process, each
    device has a shard (`ShardedOverDevices`). In several processes with one device each, each
    process has a shard (`ShardedOverProcesses`). In several processes with several devices each,
    every process has all shards, over its devices, and gradients are summed over the processes, as
    in PyTorch's hybrid sharding.

    Example:
        >>> from tfdist.strategies.sharded.strategy import Sharded
        >>> trainer = tfdist.Trainer(build_model, strategy=Sharded(2, shard="gradients"))
        >>> trainer.strategy.shard
        'gradients'

    Args:
        devices: As for `tfdist.devices.resolve`; one replica on each. None with several processes:
            one device.
        shard: What is sharded: `"optimizer"`: the optimizer state (ZeRO 1); `"gradients"`: also the
            sums of gradients (ZeRO 2); `"parameters"`: also the weights (ZeRO 3), which are
            gathered where they are read.
        smallest: The smallest number of elements of a weight that is sharded.
        offload: `"optimizer"`: the shards of weights and optimizer state are in the host's memory
            and updated by its processor, in the manner of ZeRO-Offload (Ren et al. 2021,
            "ZeRO-Offload: Democratizing Billion-Scale Model Training").
        process_group: What exchanges sums between processes: `"horovod"`, `"tensorflow"`, or
            `"auto"`, which is Horovod.

    Raises:
        ConfigurationError: An unknown option, or one that the process group does not support.
        DeviceError: A device that does not exist.
        MissingError: Several processes, and Horovod is not installed.
    """
    STRATEGIES["sharded"].check(shard=shard, offload=offload, process_group=process_group)
    has_several = (
        devices > 1
        if isinstance(devices, int)
        else not isinstance(devices, str) and (devices is not None and len(devices) > 1)
    )
    if cluster.started_together() is None or has_several:
        return ShardedOverDevices(devices, shard, smallest, offload, process_group)
    return ShardedOverProcesses(devices, shard, smallest, offload, process_group)


class ShardedOverDevices(Towers):
    """Synchronous replicas, where each device of a process owns a shard of the state.

    Each of several processes has all shards. Sums over its devices are summed over the processes,
    each on the device that needs it.
    """

    name = "sharded"
    variables: DeviceShards

    def __init__(
        self,
        devices: int | str | Sequence[str] | None,
        shard: str,
        smallest: int,
        offload: str,
        process_group: str,
    ) -> None:
        names, group = join_processes(process_group, devices, self.default_cpus)
        super().__init__(names, group=group)
        self.parameter_device, self.shard = self.devices[0], shard
        exchange = self._threads.exchange
        self.variables = DeviceShards(self.devices, group, shard, smallest, offload, exchange)

    def run(self, fn: ReplicaFn) -> list[Any]:
        if not self.variables.copies_weights:
            return super().run(fn)

        def on_tower(index: int) -> Any:
            with mirrored_variables.on_device(self.devices[index] if index else ""):
                return fn(index)

        with mirrored_variables.read_local():
            return super().run(on_tower)

    def _sum(self, terms_by_tower: list[list]) -> list:
        """Sums over towers and processes, each tensor where the first tower has it."""
        sums = []
        for terms in zip(*terms_by_tower, strict=True):
            with tf.device(terms[0].device):
                sums.append(local_sum(terms))
        return by_device(self.group.all_reduce, sums) if self.group.size > 1 else sums


class ShardedOverProcesses(OneDevice):
    """Synchronous replicas, one per process, where each process owns a shard of the state.

    Gradients are summed by a reduce-scatter, which gives each process the shard that it updates.
    Weights are all-gathered once per step: before they are read (ZeRO 3), or after the update (ZeRO
    1 and 2). What is not sharded is all-reduced.

    Raises:
        MissingError: Horovod is not installed.
        ConfigurationError: Several devices.
    """

    name = "sharded"

    def __init__(
        self,
        devices: int | str | Sequence[str] | None,
        shard: str,
        smallest: int,
        offload: str,
        process_group: str,
    ) -> None:
        group: ProcessGroup
        if process_group == "tensorflow":
            group = CollectiveGroup(devices)
            devices = group.devices
            if shard == "parameters" and group.gathers_in_order:
                raise ConfigurationError(
                    "shard='parameters' gathers weights during the backward pass, in another order "
                    "than NCCL as TensorFlow calls it allows. Use process_group='horovod', or "
                    "shard='gradients'."
                )
        else:
            group = HorovodGroup()
            devices = device_of_rank(group.local_rank) if devices is None else devices
        # Before any exchange: those of the base class, too, let rank 0 finish first.
        self._coordinator = coordinator_of(group)
        # Shards are summed while the backward pass continues.
        exchange = GradientExchange("auto")
        super().__init__(devices, group, exchange)
        self.shard = shard
        self.variables = ProcessShards(
            self.devices, group, shard, smallest, offload, exchange, self._coordinator
        )

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        try:
            with super().translate_errors():
                yield
        except Exception:  # raised again; interrupts, which all processes get, are not failures
            self._coordinator.has_failed = True
            raise
        self._coordinator.has_failed = False
