"""Mirrored: every device has a copy of the variables, on `tf.distribute.MirroredStrategy`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.devices import refuse_remote, resolve
from tfdist.errors import ConfigurationError
from tfdist.strategies import STRATEGIES
from tfdist.strategies.tf_distribute import TFDistribute

#: With a shared trace a step of a two-layer network (4 weights) takes 8 % longer, and its first
#: step is fast anyway. ResNet-50 has 320 weights.
_ONE_TRACE_FROM = 24


class Mirrored(TFDistribute):
    """Synchronous replicas on the devices of one process.

    Example:
        >>> from tfdist.strategies.mirrored import Mirrored
        >>> trainer = tfdist.Trainer(build_model, strategy=Mirrored(2, "hierarchical_copy"))
        >>> trainer.describe()["all-reduce"]
        'hierarchical_copy'

    Args:
        devices: As for `tfdist.devices.resolve`.
        all_reduce: How gradients are summed over the devices: `"nccl"` (GPUs only),
            `"hierarchical_copy"` (copies in a tree, for hosts whose GPUs are linked in pairs),
            `"one_device"` (summed on one device and sent back), `"auto"` (NCCL with several GPUs).
        merge_on: Where `"one_device"` sums: `"gpu"`: on the first GPU; `"cpu"`: in the host's
            memory; `"auto"`: on the first device.
        prefetch_to_device: As for `TFDistribute`.
        one_trace_from: As `Strategy.one_trace_from`.

    Raises:
        ConfigurationError: A reduction that is unknown or does not fit the devices.
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
        reason = "TensorFlow mirrors variables within a process only"
        refuse_remote(devices, "strategy 'mirrored'", reason)
        names = resolve(devices, self.default_cpus)
        self.reduction = _resolve(all_reduce, merge_on, names)
        # Always explicit: TensorFlow's default keeps collective keys for the whole process, so that
        # a second strategy object fails (tensorflow#62790).
        if self.reduction == "nccl":
            operations = tf.distribute.NcclAllReduce()
        elif self.reduction == "hierarchical_copy":
            operations = tf.distribute.HierarchicalCopyAllReduce()
        else:
            device = "CPU:0" if merge_on == "cpu" else names[0]
            operations = tf.distribute.ReductionToOneDevice(reduce_to_device=f"/device:{device}")
        super().__init__(
            names, tf.distribute.MirroredStrategy(names, operations), prefetch_to_device
        )

    @property
    def _uses_nccl(self) -> bool:
        return self.reduction == "nccl"

    def describe(self) -> dict[str, str]:
        return super().describe() | {"all-reduce": self.reduction}


def _resolve(all_reduce: str, merge_on: str, devices: Sequence[str]) -> str:
    """Checks the two options against the devices and returns the reduction."""
    gpus = [name for name in devices if name.startswith("GPU")]
    STRATEGIES["mirrored"].check(all_reduce=all_reduce, merge_on=merge_on)
    if all_reduce == "nccl" and len(gpus) < len(devices):
        raise ConfigurationError(
            f"all_reduce='nccl' requires GPUs, but the devices are {', '.join(devices)}: "
            "use all_reduce='auto'."
        )
    if all_reduce == "hierarchical_copy" and len(devices) % 2:
        # TensorFlow sums two halves of equal size and ignores a remaining device.
        raise ConfigurationError(
            f"all_reduce='hierarchical_copy' requires an even number of devices, but there are "
            f"{len(devices)}: use an even number, or all_reduce='auto'."
        )
    if merge_on == "gpu" and not gpus:
        raise ConfigurationError("merge_on='gpu', but no device is a GPU: use merge_on='auto'.")
    if merge_on == "cpu" and all_reduce in ("nccl", "hierarchical_copy"):
        raise ConfigurationError(
            f"merge_on='cpu' sums on the host, but all_reduce={all_reduce!r} sums on the GPUs: "
            "use all_reduce='one_device'."
        )
    if all_reduce != "auto":
        return all_reduce
    return "nccl" if len(gpus) > 1 and merge_on != "cpu" else "one_device"
