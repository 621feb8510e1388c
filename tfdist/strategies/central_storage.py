"""Central storage: one set of variables, read by every device.

On `tf.distribute.experimental.CentralStorageStrategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster.remote import connection
from tfdist.devices import resolve
from tfdist.groups.base import LocalGroup
from tfdist.strategies.tf_distribute import TFDistribute
from tfdist.strategies.variables import SharedVariables


class CentralStorage(TFDistribute):
    """Synchronous replicas over one set of variables.

    For large weights, such as embeddings, that each GPU need not hold, or GPUs without a direct
    link.

    Example:
        >>> from tfdist.strategies.central_storage import CentralStorage
        >>> trainer = tfdist.Trainer(build_model, strategy=CentralStorage(2, "CPU:0"))
        >>> trainer.describe()["parameters on"]
        'CPU:0'

    Args:
        devices: As for `tfdist.devices.resolve`.
        parameter_device: Holds the variables, sums the gradients and applies them.
        prefetch_to_device: As for `TFDistribute`.

    Raises:
        DeviceError: A device that does not exist.
    """

    name = "central_storage"

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        parameter_device: str = "CPU:0",
        prefetch_to_device: bool | None = None,
    ) -> None:
        names = resolve(devices, self.default_cpus)
        (parameter_device,) = resolve([parameter_device], self.default_cpus)
        self.parameter_device = connection.on_this_host(parameter_device)
        super().__init__(
            names,
            tf.distribute.experimental.CentralStorageStrategy(
                [*map(connection.path, names)], connection.path(self.parameter_device)
            ),
            prefetch_to_device,
            variables=SharedVariables(names, LocalGroup(), self.parameter_device),
        )

    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        # There is one set of variables, and every replica has the same sums.
        with tf.device(self.parameter_device):
            return [fn(self.local_results(results)[0])]
