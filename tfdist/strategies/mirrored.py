"""Mirrored: every device holds a copy of the variables, on `tf.distribute.MirroredStrategy`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.devices import resolve
from tfdist.errors import ConfigurationError
from tfdist.strategies import STRATEGIES
from tfdist.strategies.tf_distribute import TFDistribute

#: A step of a network of two layers calls functions of 180 operations in 8 % more time than it
#: takes where each replica has its own; it has no start to gain. ResNet-50 has 8,600 operations.
_ONE_TRACE_FROM = 1000


class Mirrored(TFDistribute):
    """Synchronous replicas on the devices of one process.

    Args:
        devices: As `tfdist.devices.resolve` takes them.
        all_reduce: How sums cross the devices: `"nccl"` (GPUs only), `"hierarchical_copy"`
            (copies in a tree, for hosts whose GPUs are linked in pairs), `"one_device"` (added up
            on one device and sent back), `"auto"` (NCCL where there are several GPUs).
        merge_on: Where `"one_device"` adds up: `"gpu"`: the first one; `"cpu"`: in the host's
            memory; `"auto"`: the first device.
        prefetch_to_device: As in `TFDistribute`.
        one_trace_from: As `Strategy.one_trace_from`.

    Raises:
        ConfigurationError: A way of reducing that is unknown or does not fit the devices.
    """

    name = "mirrored"

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        all_reduce: str = "auto",
        merge_on: str = "auto",
        prefetch_to_device: bool | None = None,
        one_trace_from: int = _ONE_TRACE_FROM,
    ) -> None:
        self.one_trace_from = one_trace_from
        names = resolve(devices, self.default_cpus)
        self.reduction = _resolve(all_reduce, merge_on, names)
        # Always explicit: TensorFlow's default keeps collective keys for the whole process, on
        # which a second strategy object fails (tensorflow#62790).
        operations = _cross_device_ops(self.reduction, merge_on, names)
        super().__init__(
            names, tf.distribute.MirroredStrategy(names, operations), prefetch_to_device
        )

    @property
    def _uses_nccl(self) -> bool:
        return self.reduction == "nccl"

    def describe(self) -> dict[str, str]:
        return super().describe() | {"all-reduce": self.reduction}


def _resolve(all_reduce: str, merge_on: str, devices: Sequence[str]) -> str:
    """Checks the two choices against the devices and returns the reduction that is meant."""
    gpus = [name for name in devices if name.startswith("GPU")]
    STRATEGIES["mirrored"].check(all_reduce=all_reduce, merge_on=merge_on)
    if all_reduce == "nccl" and len(gpus) < len(devices):
        raise ConfigurationError(
            f"all_reduce='nccl' joins GPUs, but the devices are {', '.join(devices)}: "
            "use all_reduce='auto'."
        )
    if all_reduce == "hierarchical_copy" and len(devices) % 2:
        # TensorFlow adds up two halves of equal size and forgets the device that is over.
        raise ConfigurationError(
            f"all_reduce='hierarchical_copy' joins pairs, but there are {len(devices)} devices: "
            "use an even number, or all_reduce='auto'."
        )
    if merge_on == "gpu" and not gpus:
        raise ConfigurationError("merge_on='gpu', but no device is a GPU: use merge_on='auto'.")
    if merge_on == "cpu" and all_reduce in ("nccl", "hierarchical_copy"):
        raise ConfigurationError(
            f"merge_on='cpu' adds up on the host, all_reduce={all_reduce!r} on the GPUs: "
            "use all_reduce='one_device'."
        )
    if all_reduce != "auto":
        return all_reduce
    return "nccl" if len(gpus) > 1 and merge_on != "cpu" else "one_device"


def _cross_device_ops(
    reduction: str, merge_on: str, devices: Sequence[str]
) -> tf.distribute.CrossDeviceOps:
    """Returns TensorFlow's operations for a resolved reduction."""
    if reduction == "nccl":
        return tf.distribute.NcclAllReduce()
    if reduction == "hierarchical_copy":
        return tf.distribute.HierarchicalCopyAllReduce()
    device = "CPU:0" if merge_on == "cpu" else devices[0]
    return tf.distribute.ReductionToOneDevice(reduce_to_device=f"/device:{device}")
