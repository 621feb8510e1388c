"""Horovod: one process a device, joined by MPI, Gloo or NCCL.

On Horovod's operations alone (`grouped_allreduce`, `allgather`): its own Keras optimizer and
callbacks do not know Keras 3.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import cluster, devices
from tfdist.cluster import liveness
from tfdist.cluster.gpus import PER_WORKER
from tfdist.cluster.liveness import roll_call
from tfdist.errors import ClusterError, ConfigurationError, MissingError
from tfdist.strategies import STRATEGIES
from tfdist.strategies.collectives import traffic
from tfdist.strategies.collectives.fusion import by_dtype, fused
from tfdist.strategies.several_workers import SeveralWorkers
from tfdist.watchdog import start_up


class Horovod(SeveralWorkers):
    """Synchronous replicas, one in each process that `mpirun` or `horovodrun` started.

    Tensor fusion and cycle time stay with Horovod's own variables (`HOROVOD_FUSION_THRESHOLD`,
    `HOROVOD_CYCLE_TIME`), except that groups of tensors cross apart, in no order
    (`HOROVOD_DISABLE_GROUP_FUSION`): buckets are such groups.

    Args:
        devices: The device of this process; None: the GPU of its rank on this host, or the CPU.
        compression: `"fp16"` halves what crosses, and rounds it; `"none"` keeps the numbers of
            one device.
        bucket_mb: As of `SeveralWorkers.cross_as`.

    Raises:
        MissingError: Horovod is not installed.
        ConfigurationError: Several devices, a compression that is unknown or not Horovod's, or no
            size of a bucket.
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
        self.cross_as(compression, bucket_mb)
        self.enter()
        super().__init__(_device(self._hvd.local_rank()) if devices is None else devices)
        self.start()

    def enter(self) -> None:
        """Starts Horovod, and takes from it which of how many processes this one is."""
        self._hvd = started()
        self.buckets_wait = not _groups_cross_alone()
        self.num_workers, self.rank = self._hvd.size(), self._hvd.rank()

    def enter_with_devices(self) -> None:
        """Does so for a process of several devices: it has its part of the host's GPUs."""
        self.enter()
        own_gpus(self._hvd.local_rank(), self._hvd.local_size())

    def silent(self) -> list[int]:
        return _silent()

    def describe(self) -> dict[str, str]:
        return super().describe() | {"all-reduce": _operations(self._hvd)}

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        sums = fused(functools.partial(by_dtype, self._sum), tensors)
        return sums if op == "SUM" else [total / self.num_workers for total in sums]

    def gather_words(self, words: np.ndarray) -> np.ndarray:
        with tf.device("CPU:0"):
            whole = self._hvd.allgather(tf.constant(words), name="tfdist_words")
        return whole.numpy().reshape(self.num_workers, -1)

    def _sum(self, tensors: list) -> list:
        """Sums tensors of one dtype over the processes; slices are laid end to end."""
        dense = [t for t in tensors if not isinstance(t, tf.IndexedSlices)]
        sums = iter(self._grouped("all-reduce", self._hvd.grouped_allreduce, dense))
        return [
            self._gathered(t) if isinstance(t, tf.IndexedSlices) else next(sums) for t in tensors
        ]

    def _grouped(
        self, name: traffic.Exchange, operation: Callable[..., list], tensors: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Hands tensors of one dtype together to one of Horovod's operations that sum."""
        if not tensors:
            return []
        # Horovod knows no bfloat16.
        known = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in tensors]
        # It pairs tensors by their names, and those of layers may differ from rank to rank.
        known = [tf.identity(t, name=name) for t in known]
        traffic.note(name, known)
        sums = operation(known, op=self._hvd.Sum)
        return [tf.cast(total, t.dtype) for total, t in zip(sums, tensors, strict=True)]

    def _gathered(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        values, indices = map(self._hvd.allgather, (slices.values, slices.indices))
        traffic.note("all-gather", [values, indices])
        return tf.IndexedSlices(values, indices, slices.dense_shape)


#: Horovod's variable that keeps it from laying groups of tensors into one exchange, which it does
#: by chance of when they come.
_CROSS_ALONE = "HOROVOD_DISABLE_GROUP_FUSION"

#: Where the other ranks give signs of life; MPI tells nothing.
_others: dict[int, str] = {}


def _silent() -> list[int]:
    return liveness.silent(_others)


def installed() -> Any:
    """Returns `horovod.tensorflow`.

    Raises:
        MissingError: Horovod is not installed.
    """
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise MissingError(
            f"strategy 'horovod', or 'sharded' over processes, needs Horovod, which is not "
            f"installed for this TensorFlow ({error}): run make horovod, or see "
            "python -m tfdist.doctor."
        ) from error
    return hvd


@functools.cache
def started() -> Any:
    """Returns `horovod.tensorflow`, started in this process, with its rank told to `cluster`.

    Raises:
        MissingError: Horovod is not installed.
        ClusterError: A launcher started other processes than Horovod joined, or ranks are missing.
    """
    hvd, told = installed(), cluster.started_together()
    if not hvd.is_initialized():  # that looks at its variables then, and never again
        os.environ.setdefault(_CROSS_ALONE, "1")
    # Several processes of a host wait for each other: a wait that spins starves who computes.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    # Gloo would abort this process, where the watchdog names who is missing.
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(2 * int(start_up.SECONDS)))
    if told:
        _others.update(roll_call(told.rank, told.size))
    with start_up.waiting(told.rank if told else 0, told.size if told else 1, _silent):
        hvd.init()
    if told and told.size != hvd.size():
        raise ClusterError(
            f"{told.source} says rank {told.rank} of {told.size}, Horovod says {hvd.rank()} of "
            f"{hvd.size()}: start the processes with the mpirun of the MPI that Horovod was built "
            "with, or with horovodrun --gloo; python -m tfdist.doctor tells which."
        )
    atexit.register(hvd.shutdown)
    source = "Horovod over MPI" if hvd.mpi_enabled() else "Horovod over Gloo"
    place = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    cluster.use(cluster.Cluster(source, *place))
    return hvd


def _groups_cross_alone() -> bool:
    """Whether each grouped operation is an exchange of its own; of a Horovod that is started."""
    told = os.environ.get(_CROSS_ALONE, "")
    return told.isdigit() and int(told) > 0


def own_gpus(local_rank: int, local_size: int) -> int:
    """Shows this process its part of the host's GPUs alone, where there are enough for all.

    Returns:
        The number, among those that it sees, of its first.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if os.environ.get(PER_WORKER):  # the launcher has divided them
        return 0
    each = max(len(gpus) // max(local_size, 1), 1)
    first = local_rank * each % max(len(gpus), 1)
    try:
        tf.config.set_visible_devices(gpus[first : first + each], "GPU")
    except RuntimeError:  # TensorFlow has started, and goes on seeing all
        return first
    return 0


def _device(local_rank: int) -> str:
    """The GPU of this rank on its host, where possible the only one that it sees; or the CPU."""
    gpus = len(tf.config.get_visible_devices("GPU"))
    if not gpus:
        return "CPU:0"
    number = own_gpus(local_rank, gpus)
    devices.configure()
    return f"GPU:{number}"


def _operations(hvd: Any) -> str:
    """What carries the sums, as far as Horovod tells."""
    if hvd.nccl_built() and tf.config.get_visible_devices("GPU"):
        return "NCCL"
    return "MPI" if hvd.mpi_enabled() else "Gloo"
