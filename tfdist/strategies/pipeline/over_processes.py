"""Pipelines of several processes that Horovod joins: data parallelism over models in stages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tfdist.strategies.collectives import host_values
from tfdist.strategies.collectives.fusion import by_device, by_dtype, fused
from tfdist.strategies.horovod import Horovod
from tfdist.strategies.pipeline.of_process import PipelineOfProcess


class PipelineOverProcesses(Horovod, PipelineOfProcess):
    """A pipeline with all stages in each process; a stage's sums cross from its own device.

    Args:
        devices: Of this process, one a stage; None: its part of the host's GPUs, or logical CPU
            devices.
        **options: As of `PipelineOfProcess`.

    Raises:
        ConfigurationError: Numbers that do not go together, or differ from process to process.
        MissingError: Horovod is not installed.
    """

    name = PipelineOfProcess.name

    def __init__(
        self, devices: int | str | Sequence[str] | None = None, *args: Any, **options: Any
    ) -> None:
        self.enter_with_devices()
        PipelineOfProcess.__init__(self, devices, *args, **options)
        self.start()
        if not self.is_chief:
            self.cutting.plot_stages = None

    def start(self) -> None:
        super().start()
        host_values.check_as_many(self, self.micro_batches, "micro-batches", "micro_batches")

    def agreed(self, seconds: list[float]) -> list[float]:
        """Those of rank 0: all processes have to cut alike."""
        return self.gather(seconds)[0].tolist()

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        return PipelineOfProcess.all_reduce(self, tensors, op)

    def _add_up(self, asked: list[list]) -> list:
        """Sums over the micro-batches of this process, and then over the processes."""
        sums = super()._add_up(asked)
        across = functools.partial(fused, functools.partial(by_dtype, self._sum))
        return by_device(across, sums)
