"""Split models in several processes that Horovod joins: data parallelism over them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.channel_split.of_process import ChannelSplitOfProcess
from tfdist.strategies.channel_split.rules import Rules
from tfdist.strategies.collectives.fusion import by_device
from tfdist.strategies.horovod import Horovod


class ChannelSplitOverProcesses(Horovod, ChannelSplitOfProcess):
    """A replica with all parts in each process; what is summed crosses from its own device.

    Args:
        devices: Of this process, as of `ChannelSplit`; None: its part of the host's GPUs, or
            logical CPU devices.
        layout: As there.
        smallest: As there.

    Raises:
        ConfigurationError: Fewer than two devices, a rule that is none, or numbers of devices that
            differ from process to process.
        MissingError: Horovod is not installed.
    """

    name = ChannelSplitOfProcess.name

    def __init__(
        self,
        devices: int | str | Sequence[str] | None,
        layout: Rules | None,
        smallest: int,
    ) -> None:
        self.enter_with_devices()
        ChannelSplitOfProcess.__init__(self, devices, layout, smallest)
        self.start()

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        return by_device(functools.partial(super().all_reduce, op=op), tensors)

    def sum_in_parts(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums the gradients of each part over the processes, on its device."""
        own = super().sum_in_parts(gradients, variables)
        return tf.nest.pack_sequence_as(own, self.all_reduce(tf.nest.flatten(own)))
