"""Towers: data parallelism written out, without `tf.distribute`.

There is one graph per device, all on the same variables, and sums are computed on a parameter
device. Other strategies automate this. Read this module to learn how a strategy works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster.remote import connection
from tfdist.devices import resolve
from tfdist.groups.base import LocalGroup, ProcessGroup
from tfdist.groups.fusion import fused, local_sum
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.replica_threads import ReplicaThreads
from tfdist.strategies.variables import SharedVariables


class Towers(Strategy):
    """Synchronous replicas over shared variables.

    Example:
        >>> from tfdist.strategies.towers import Towers
        >>> trainer = tfdist.Trainer(build_model, strategy=Towers(2))
        >>> trainer.strategy.num_replicas
        2

    Args:
        devices: As for `tfdist.devices.resolve`; one tower on each.
        parameter_device: Holds the variables, sums the gradients and applies them.
        group: The processes that train together, for subclasses that sum over them; None: this
            process alone.

    Raises:
        DeviceError: A device that does not exist.
    """

    name = "towers"
    default_cpus = 2

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        parameter_device: str = "CPU:0",
        group: ProcessGroup | None = None,
    ) -> None:
        names = resolve(devices, self.default_cpus)
        (parameter_device,) = resolve([parameter_device], self.default_cpus)
        self.parameter_device = connection.on_this_host(parameter_device)
        group = LocalGroup() if group is None else group
        super().__init__(names, group, SharedVariables(names, group, self.parameter_device))
        self._threads = ReplicaThreads()

    def run(self, fn: ReplicaFn) -> list[Any]:
        return self._threads.run(fn, self.devices, self._sum)

    def _sum(self, terms_by_tower: list[list]) -> list:
        """Sums over the towers, tensor by tensor, on the parameter device."""
        with tf.device(self.parameter_device):
            return [local_sum(terms) for terms in zip(*terms_by_tower, strict=True)]

    def local_results(self, results: list[Any]) -> list[Any]:
        return results

    def update(self, fn: Callable[[Any], Any], results: list[Any]) -> list[Any]:
        with tf.device(self.parameter_device):
            return [fn(results[0])]

    def all_reduce(self, tensors: list) -> list:
        return fused(self._threads.exchange, tensors)
