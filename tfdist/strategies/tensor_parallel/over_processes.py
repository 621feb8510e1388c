"""Split models in several processes that Horovod joins: data parallelism over them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.collectives.fusion import by_device
from tfdist.strategies.horovod import Horovod
from tfdist.strategies.tensor_parallel.of_process import TensorParallelOfProcess
from tfdist.strategies.tensor_parallel.rules import Rules


class TensorParallelOverProcesses(Horovod, TensorParallelOfProcess):
    """A replica with all parts in each process; what is summed crosses from its own device.

    Args:
        devices: Of this process, as of `TensorParallel`; None: its part of the host's GPUs, or
            logical CPU devices.
        layout: As there.
        smallest: As there.

    Raises:
        ConfigurationError: Fewer than two devices, a rule that is none, or numbers of devices that
            differ from process to process.
        MissingError: Horovod is not installed.
    """

    name = TensorParallelOfProcess.name

    def __init__(
        self,
        devices: int | str | Sequence[str] | None,
        layout: Rules | None,
        smallest: int,
    ) -> None:
        self.enter_with_devices()
        TensorParallelOfProcess.__init__(self, devices, layout, smallest)
        self.start()

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        return by_device(functools.partial(super().all_reduce, op=op), tensors)

    def reduce_sharded(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums the gradients of each part over the processes, on its device."""
        own = super().reduce_sharded(gradients, variables)
        return tf.nest.pack_sequence_as(own, self.all_reduce(tf.nest.flatten(own)))
