"""Horovod: one device per process, and sums by MPI, Gloo or NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist import devices as device_names
from tfdist.errors import ConfigurationError
from tfdist.groups.buckets import GradientExchange
from tfdist.groups.horovod import HorovodGroup, limit_visible_gpus
from tfdist.strategies import STRATEGIES
from tfdist.strategies.one_device import OneDevice


class Horovod(OneDevice):
    """Synchronous replicas, one in each process that `mpirun` or `horovodrun` started.

    Example:
        >>> from tfdist.strategies.horovod import Horovod
        >>> trainer = tfdist.Trainer(build_model, strategy=Horovod(bucket_mb=4))
        >>> trainer.strategy.num_replicas
        1

    Args:
        devices: The device of this process; None: the GPU of its local rank, or the CPU.
        compression: `"fp16"` halves what is sent, and rounds it; `"none"` keeps the numbers of one
            device.
        bucket_mb: Megabytes of a gradient bucket, sent while the backward pass continues;
            `"auto"`: by the size of all gradients; `"all"`: one bucket.

    Raises:
        MissingError: Horovod is not installed.
        ConfigurationError: Several devices, a compression that is unknown or that Horovod lacks, or
            an invalid size of a bucket.
    """

    name = "horovod"

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        compression: str = "none",
        bucket_mb: float | str = "auto",
    ) -> None:
        STRATEGIES["horovod"].check(compression=compression)
        if compression == "bf16":
            raise ConfigurationError(
                "compression='bf16': Horovod has no such format; use compression='fp16', or "
                "strategy 'multi_worker'."
            )
        exchange = GradientExchange.from_options(compression, bucket_mb)
        group = HorovodGroup()
        devices = device_of_rank(group.local_rank) if devices is None else devices
        super().__init__(devices, group, exchange)


def device_of_rank(local_rank: int) -> str:
    """Returns the GPU of a local rank, if possible the only one that it sees; or the CPU."""
    gpus = len(tf.config.get_visible_devices("GPU"))
    if not gpus:
        return "CPU:0"
    index = limit_visible_gpus(local_rank, gpus)
    device_names.configure()
    return f"GPU:{index}"
