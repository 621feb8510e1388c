"""One device per process: the simplest strategy, alone or with other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.devices import resolve
from tfdist.errors import ConfigurationError
from tfdist.groups.base import ProcessGroup
from tfdist.groups.buckets import GradientExchange
from tfdist.strategies.base import ReplicaFn, Strategy


class OneDevice(Strategy):
    """One replica in each process.

    Example:
        >>> from tfdist.strategies.one_device import OneDevice
        >>> trainer = tfdist.Trainer(build_model, strategy=OneDevice())
        >>> trainer.strategy.num_replicas
        1

    Args:
        devices: One device, as for `tfdist.devices.resolve`; None: the first GPU, or the CPU.
        group: The processes that train together; None: this process alone.
        exchange: How gradients are sent between processes; None: all at once.

    Raises:
        ConfigurationError: Several devices.
        DeviceError: A device that does not exist.
    """

    name = "one_device"

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        group: ProcessGroup | None = None,
        exchange: GradientExchange | None = None,
    ) -> None:
        names = resolve(1 if devices is None else devices, self.default_cpus)
        if len(names) > 1:
            raise ConfigurationError(
                f"strategy {self.name!r} computes on one device per process, but got "
                f"{', '.join(names)}: name one; 'mirrored' and 'multi_worker' take several."
            )
        super().__init__(names, group, exchange=exchange)

    def run(self, fn: ReplicaFn) -> Any:
        with tf.device(self.devices[0]):
            return fn(0)

    def local_results(self, results: Any) -> list[Any]:
        return [results]

    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        with tf.device(self.devices[0]):
            return [fn(results)]

    def all_reduce(self, tensors: list) -> list:
        return self.group.all_reduce(tensors)
