"""The process group of Horovod: processes that `mpirun`, `horovodrun` or `tfdist.launch` started.

It uses Horovod's operations (`grouped_allreduce`, `allgather`, `grouped_reducescatter`,
`broadcast`) and nothing of `horovod.tensorflow.keras`, which does not support Keras 3.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import cluster
from tfdist.cluster import deadline, liveness
from tfdist.cluster.gpus import PER_WORKER
from tfdist.cluster.liveness import roll_call
from tfdist.cluster.networks import check_own_name
from tfdist.cluster.remote import connection
from tfdist.errors import ClusterError, MissingError
from tfdist.groups import traffic
from tfdist.groups.base import ProcessGroup
from tfdist.groups.fusion import by_dtype, fused

#: Horovod's variable that turns off the fusion of tensor groups, which depends on when they arrive.
_DISABLE_GROUP_FUSION = "HOROVOD_DISABLE_GROUP_FUSION"

#: A name scope that begins at the root of a graph. Horovod matches tensors by the names of its
#: operations, and Keras may number the layers in whose scopes these are differently on each rank.
_SCOPE = "tfdist/"

#: Addresses at which other ranks respond (`liveness`); empty with MPI.
_others: dict[int, str] = {}


class HorovodGroup(ProcessGroup):
    """The processes of a Horovod job; initializes Horovod if necessary.

    Horovod's environment variables configure tensor fusion and cycle time
    (`HOROVOD_FUSION_THRESHOLD`, `HOROVOD_CYCLE_TIME`). By default, groups of tensors such as
    gradient buckets are not fused (`HOROVOD_DISABLE_GROUP_FUSION`).

    Raises:
        MissingError: Horovod is not installed.
        ClusterError: The launcher and Horovod disagree about the processes, or ranks are missing.
    """

    name = "Horovod"
    shuts_down_at_exit = True

    def __init__(self) -> None:
        super().__init__()
        self._hvd = started()
        value = os.environ.get(_DISABLE_GROUP_FUSION, "")
        self.sums_in_order = not (value.isdigit() and int(value) > 0)
        self.size, self.rank = self._hvd.size(), self._hvd.rank()
        self.local_rank, self.local_size = self._hvd.local_rank(), self._hvd.local_size()

    def all_reduce(self, tensors: list) -> list:
        if self.size == 1:
            return tensors
        return fused(functools.partial(by_dtype, self._sum), tensors)

    def reduce_scatter(self, vectors: list[tf.Tensor]) -> list[tf.Tensor]:
        scatter = self._hvd.grouped_reducescatter
        return by_dtype(lambda same: self._grouped("reduce-scatter", scatter, same), vectors)

    def all_gather(self, vector: tf.Tensor, sizes: Sequence[int], name: str) -> tf.Tensor:
        del sizes  # Horovod exchanges them itself
        # Horovod does not support bfloat16, so send the bits.
        sent = tf.bitcast(vector, tf.uint16) if vector.dtype == tf.bfloat16 else vector
        whole = self._hvd.allgather(sent, name=name, ignore_name_scope=True)
        traffic.note("all-gather", [whole])
        return tf.bitcast(whole, vector.dtype) if vector.dtype == tf.bfloat16 else whole

    def broadcast_tensor(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        if tensor.dtype == tf.bfloat16:
            sent = tf.bitcast(tensor, tf.uint16)
        else:  # Horovod does not support all integer dtypes
            sent = tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.int64)
        with tf.name_scope(_SCOPE):
            received = self._hvd.broadcast(sent, root, name="tfdist_broadcast")
        if tensor.dtype == tf.bfloat16:
            return tf.bitcast(received, tf.bfloat16)
        return tf.cast(received, tensor.dtype)

    def gather_words(self, words: np.ndarray) -> np.ndarray:
        with tf.device(connection.on_this_host("CPU:0")):
            whole = self._hvd.allgather(tf.constant(words), name="tfdist_words")
        return whole.numpy().reshape(self.size, -1)

    def describe(self) -> dict[str, str]:
        if self._hvd.nccl_built() and tf.config.get_visible_devices("GPU"):
            transport = "NCCL"
        else:
            transport = "MPI" if self._hvd.mpi_enabled() else "Gloo"
        return {"all-reduce": transport}

    def silent(self) -> list[int]:
        return _silent()

    def _sum(self, tensors: list) -> list:
        dense = [t for t in tensors if not isinstance(t, tf.IndexedSlices)]
        sums = iter(self._grouped("all-reduce", self._hvd.grouped_allreduce, dense))
        return [
            self._gather_slices(t) if isinstance(t, tf.IndexedSlices) else next(sums)
            for t in tensors
        ]

    def _grouped(
        self, name: traffic.Exchange, operation: Callable[..., list], tensors: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Passes tensors of one dtype to a grouped operation of Horovod that sums them."""
        if not tensors:
            return []
        # Horovod does not support bfloat16.
        sendable = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in tensors]
        traffic.note(name, sendable)
        with tf.name_scope(_SCOPE):
            sums = operation(_named(sendable, name), op=self._hvd.Sum)
        return [tf.cast(total, t.dtype) for total, t in zip(sums, tensors, strict=True)]

    def _gather_slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        with tf.name_scope(_SCOPE):
            named = _named([slices.values, slices.indices], "all-gather")
            values, indices = map(self._hvd.allgather, named)
        traffic.note("all-gather", [values, indices])
        return tf.IndexedSlices(values, indices, slices.dense_shape)


def _named(tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Returns tensors with a name within `_SCOPE`.

    In full-batch mode only one rank sends what it computes and the others zeros, so their
    operations have different names.
    """
    return [tf.identity(tensor, name=name) for tensor in tensors]


@functools.cache  # `tfdist.script` gives scripts another module by that name
def installed() -> Any:
    """Returns `horovod.tensorflow`.

    Raises:
        MissingError: Horovod is not installed.
    """
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise MissingError(
            f"Horovod is not installed for this TensorFlow ({error}), but strategy 'horovod' needs "
            "it. Run tfdist install_horovod, or see tfdist doctor."
        ) from error
    return hvd


def check_host_name() -> None:
    """Checks the name of this host if Horovod is going to use Gloo, which resolves it.

    Raises:
        ClusterError: Horovod would crash.
    """
    workers = cluster.started_together()
    if workers and "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        check_own_name(is_alone=workers.local_size == workers.size)


@functools.cache
def started() -> Any:
    """Initializes Horovod, sets the cluster of this process, and returns `horovod.tensorflow`.

    Raises:
        MissingError: Horovod is not installed.
        ClusterError: The launcher and Horovod disagree about the processes, or ranks are missing.
    """
    hvd, expected = installed(), cluster.started_together()
    if not hvd.is_initialized():
        check_host_name()
        # Horovod reads the variables only in `init`.
        os.environ.setdefault(_DISABLE_GROUP_FUSION, "1")
    # Processes on a host wait for each other. Busy waiting would take cores from those that
    # compute.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    # After its timeout, Gloo aborts the process. Let the watchdog report the missing rank before.
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(2 * int(deadline.SECONDS)))
    if expected:
        _others.update(roll_call(expected.rank, expected.size))
    with deadline.waiting(
        expected.rank if expected else 0, expected.size if expected else 1, _silent
    ):
        hvd.init()
    if expected and expected.size != hvd.size():
        raise ClusterError(
            f"{expected.source} has rank {expected.rank} of {expected.size}, but Horovod has "
            f"{hvd.rank()} of {hvd.size()}. Start the processes with the mpirun of the MPI that "
            "Horovod was built with, or with horovodrun --gloo. tfdist doctor shows "
            "the MPI."
        )
    atexit.register(hvd.shutdown)
    source = "Horovod over MPI" if hvd.mpi_enabled() else "Horovod over Gloo"
    ranks = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()
    cluster.use(cluster.Cluster(source, *ranks))
    return hvd


def limit_visible_gpus(local_rank: int, local_size: int) -> int:
    """Makes only this process's GPUs visible, if the host has enough GPUs for all processes.

    Returns:
        The index of its first GPU among its visible GPUs.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if os.environ.get(PER_WORKER):  # the launcher has divided them
        return 0
    each = max(len(gpus) // max(local_size, 1), 1)
    first = local_rank * each % max(len(gpus), 1)
    try:
        tf.config.set_visible_devices(gpus[first : first + each], "GPU")
    except RuntimeError:  # TensorFlow is initialized, so all GPUs stay visible
        return first
    return 0


def _silent() -> list[int]:
    return liveness.silent(_others)
