"""The process group of TensorFlow's own collectives, over gRPC or NCCL."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdist import cluster
from tfdist.cluster import Cluster, deadline, gpus, liveness
from tfdist.devices import refuse_remote, requested_gpus, resolve, use_gpus
from tfdist.errors import ClusterError, ConfigurationError, first_line
from tfdist.groups import traffic
from tfdist.groups.base import ProcessGroup
from tfdist.groups.fusion import fused, has_size, in_chunks, wire_dtype
from tfdist.groups.varying_sizes import VaryingSizes
from tfdist.upstream.tensorflow_runtime import (
    has_started,
    ordering_tokens,
    set_timeouts,
    start_without_hook,
    workers_on,
)

#: Maximum seconds to wait for the other workers.
JOIN_SECONDS = 120
#: Seconds without a heartbeat after which TensorFlow considers a worker lost.
HEARTBEAT_SECONDS = 20

#: Maximum bytes of one collective over gRPC. By default TensorFlow packs all gradients of a step
#: into one collective. 100 MB in one collective take three times as long as in chunks of 2 to 8 MB
#: (1.9 s and 0.6 s; 16 MB take 0.10 s and 0.07 s; two processes on a busy host).
CHUNK_BYTES = 1 << 22


class CollectiveGroup(ProcessGroup):
    """Workers that communicate by TensorFlow's collectives. Each has the same number of devices.

    A process joins a cluster when TensorFlow starts, so create the group before the first
    operation. Each device communicates with the device of the same number in the other processes.

    Args:
        devices: The devices of this process, as for `tfdist.devices.resolve`. Workers that see the
            same GPUs divide them by rank.
        communication: `"ring"` (gRPC), `"nccl"` (GPUs) or `"auto"`.
        default_cpus: As for `tfdist.devices.resolve`.

    Raises:
        ClusterError: Workers are missing, or TensorFlow has already been initialized.
        ConfigurationError: The devices do not support the communication.
        DeviceError: A device does not exist.
    """

    name = "TensorFlow"

    def __init__(
        self,
        devices: int | str | Sequence[str] | None,
        communication: str = "auto",
        default_cpus: int = 1,
    ) -> None:
        super().__init__()
        start_without_hook()
        workers = cluster.current()
        self._cluster, self.devices = _meet(workers, devices, communication, default_cpus)
        self.communication = resolve_communication(communication, self.devices)
        self.size, self.rank = self._cluster.size, self._cluster.rank
        self.local_rank = self._cluster.local_rank
        names = tuple(self.devices)
        others = self._cluster if self.size > 1 else None
        self.tf_strategy = _tf_strategy(names, self.communication, others)
        self._places = list(self.tf_strategy.extended.worker_devices)
        # One channel per device number, for the devices with this number in all processes.
        tokens = ordering_tokens(self.tf_strategy)
        self._channels = self._channels_of(tokens)
        # Collectives with the same token run in the order in which they were traced. The backward
        # pass all-gathers weights for operations that were traced earlier, and all-reduces depend
        # on the results of these operations. Thus all-gathers have separate tokens, to avoid
        # deadlocks. NCCL requires a single order for all collectives.
        self.gathers_in_order = self.communication == "nccl"
        self._gather_channels = self._channels
        if not self.gathers_in_order:
            self._gather_channels = self._channels_of(list(map(_token_on, self._places)))

    def _channels_of(self, tokens: Sequence[tf.Variable]) -> list[VaryingSizes]:
        return [VaryingSizes([token], self.rank, self.size, self.communication) for token in tokens]

    def all_reduce(self, tensors: list) -> list:
        if self.size == 1 or not tensors:
            return tensors
        by_nccl = self.communication == "nccl"
        sums = fused(self._sums, [tf.cast(t, wire_dtype(t.dtype, by_nccl)) for t in tensors])
        return [tf.cast(total, t.dtype) for total, t in zip(sums, tensors, strict=True)]

    def all_gather(self, vector: tf.Tensor, sizes: Sequence[int], name: str) -> tf.Tensor:
        del name  # exchanges are numbered in the order in which they are traced
        if self.size == 1:
            return vector
        # Pad to the same number of elements. `order` contains the rank of each row of the result.
        longest, channel = max(sizes), self._channel_of(vector)
        order = self._order(channel)
        local = tf.pad(vector, [[0, longest - sizes[self.rank]]])
        rows = tf.reshape(self._gather(local, channel), [self.size, longest])
        row_of = {rank: row for row, rank in enumerate(order)}
        whole = tf.concat([rows[row_of[rank]][:size] for rank, size in enumerate(sizes)], 0)
        traffic.note("all-gather", [whole])
        return whole

    def broadcast_tensor(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        # An all-reduce with zeros on the other ranks, in a dtype that all transports support.
        if tensor.dtype.is_floating:
            sent = tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
        else:
            sent = tf.cast(tensor, tf.int64)
        summand = sent if self.rank == root else tf.zeros_like(sent)
        return tf.cast(self.all_reduce([summand])[0], tensor.dtype)

    def gather_words(self, words: np.ndarray) -> np.ndarray:
        if self.size == 1:
            return words[np.newaxis]
        numbered = tf.constant(np.concatenate([[self.rank], words]))
        rows = self._gather(numbered, 0).numpy().reshape(self.size, 1 + words.size)
        return rows[np.argsort(rows[:, 0]), 1:]

    def describe(self) -> dict[str, str]:
        return {"all-reduce": self.communication}

    def silent(self) -> list[int]:
        return _silent(self._cluster)

    def _sums(self, tensors: list) -> list:
        """Sums tensors over the processes, one by one, and large ones in chunks."""
        most = CHUNK_BYTES if self.communication == "ring" else sys.maxsize

        def each(pieces: list) -> list:
            return [self._sum(piece, self._channel_of(piece)) for piece in pieces]

        results = []
        for tensor in tensors:
            results += in_chunks(each, [tensor], most) if has_size(tensor) else each([tensor])
        return results

    def _sum(self, tensor: tf.Tensor | tf.IndexedSlices, channel: int) -> tf.Tensor:
        if isinstance(tensor, tf.IndexedSlices):
            return self._channels[channel].reduce(tensor, self.rank)
        traffic.note("all-reduce", [tensor])
        if not tf.executing_eagerly():
            with tf.device(self._places[channel]):
                return self._channels[channel].reduce(tensor, self.rank)
        total = self._eager(channel, "reduce", tensor.dtype)(tf.reshape(tensor, [-1]))
        return tf.reshape(total, tensor.shape)

    def _gather(self, vector: tf.Tensor, channel: int) -> tf.Tensor:
        """Concatenates vectors of the same size, in TensorFlow's order of the processes."""
        if not tf.executing_eagerly():
            with tf.device(self._places[channel]):
                return self._gather_channels[channel].gather(vector, self.rank)
        return self._eager(channel, "gather", vector.dtype)(vector)

    @functools.cache  # noqa: B019 - groups live as long as the process
    def _eager(
        self, channel: int, operation: str, dtype: tf.DType
    ) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns a `tf.function` for eager calls, because each eager collective needs new keys."""

        def exchange(vector: tf.Tensor) -> tf.Tensor:
            with tf.device(self._places[channel]):
                channels = self._gather_channels if operation == "gather" else self._channels
                return getattr(channels[channel], operation)(vector, self.rank)

        spec = tf.TensorSpec([None], dtype)
        return tf.function(exchange, input_signature=[spec], autograph=False)

    @functools.cache  # noqa: B019 - groups live as long as the process
    def _order(self, channel: int) -> list[int]:
        with tf.init_scope():
            return self._gather(tf.constant([self.rank], tf.int64), channel).numpy().tolist()

    def _channel_of(self, tensor: tf.Tensor | tf.IndexedSlices) -> int:
        """Returns the number of a tensor's device; 0 if the group does not have this device."""
        device = tensor.device
        ends = (name.rpartition("/device:")[2] for name in self._places)
        return next((i for i, end in enumerate(ends) if device.endswith(f":{end}")), 0)


def _token_on(place: str) -> tf.Variable:
    """Returns a variable that orders the collectives which use it, as they were traced."""
    with tf.init_scope(), tf.device(place):
        return tf.Variable(0.0, trainable=False)


def resolve_communication(communication: str, devices: Sequence[str]) -> str:
    """Returns `"ring"` or `"nccl"`.

    Raises:
        ConfigurationError: NCCL is requested, but some devices are not GPUs.
    """
    on_gpus = all(name.startswith("GPU") for name in devices)
    if communication == "nccl" and not on_gpus:
        raise ConfigurationError(
            f"communication='nccl' requires GPUs, but the devices are {', '.join(devices)}: "
            "use communication='auto'."
        )
    if communication == "auto":
        return "nccl" if on_gpus else "ring"
    return communication


@functools.cache
def _tf_strategy(
    devices: tuple[str, ...], communication: str, workers: Cluster | None
) -> tf.distribute.Strategy:
    """Returns TensorFlow's strategy; one per process, because its collectives are numbered.

    Args:
        devices: The devices of this worker.
        communication: `"ring"` or `"nccl"`.
        workers: All workers, with their addresses; None if there is only this one.
    """
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=getattr(
            tf.distribute.experimental.CommunicationImplementation, communication.upper()
        ),
        bytes_per_pack=CHUNK_BYTES if communication == "ring" else 0,
    )
    if workers is None:
        # An empty cluster, so that TensorFlow does not read TF_CONFIG.
        no_cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        with workers_on(devices):
            return tf.distribute.MultiWorkerMirroredStrategy(no_cluster, options)
    _check_not_started()
    leader = "chief" if workers.has_chief else "worker"
    set_timeouts(workers.tasks(), leader, JOIN_SECONDS, HEARTBEAT_SECONDS)
    waiting = deadline.waiting(workers.rank, workers.size, functools.partial(_silent, workers))
    try:
        with waiting, workers_on(devices):
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(workers.tasks()),
                task_type="chief" if workers.has_chief and workers.rank == 0 else "worker",
                task_id=workers.index,
                rpc_layer="grpc",
            )
            return tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
    except (tf.errors.OpError, RuntimeError) as error:
        raise ClusterError(
            f"Rank {workers.rank} did not connect to the other workers within {JOIN_SECONDS} s: "
            f"{first_line(error)}\nStart all of {', '.join(workers.addresses)}, make sure that "
            "each can reach the others' ports, and give each a different rank."
        ) from error


def _meet(
    workers: Cluster,
    devices: int | str | Sequence[str] | None,
    communication: str,
    default_cpus: int,
) -> tuple[Cluster, list[str]]:
    """Connects all workers before TensorFlow starts, and divides GPUs that several of them see.

    Workers that see the same GPUs divide them by rank. This is the case for workers on one host,
    unless their launcher assigned GPUs to each.

    Args:
        workers: The discovered cluster, with addresses if the launcher provides them.
        devices: As for `tfdist.devices.resolve`: a number counts devices of each worker.
        communication: With `"ring"` several workers may use one GPU if there are too few.
        default_cpus: As for `tfdist.devices.resolve`.

    Returns:
        The workers with their addresses, and the names of this worker's devices.

    Raises:
        ClusterError: Workers are missing or inconsistent, or there are fewer GPUs than workers.
        DeviceError: A device does not exist.
    """
    reason = "TensorFlow connects a process to one cluster"
    refuse_remote(devices, "what exchanges sums through TensorFlow's collectives", reason)
    if workers.size == 1:
        return workers, resolve(devices, default_cpus)
    requested = requested_gpus(devices)
    names = gpus.identifiers(len(tf.config.get_visible_devices("GPU"))) if requested else []
    whole = cluster.exchange_addresses(
        workers,
        JOIN_SECONDS,
        gpus=[names[i] for i in requested],
        share_gpus=communication == "ring",
    )
    met_before = whole is workers
    cluster.use(whole)
    if not met_before and len(whole.gpus) < len(requested):
        _check_not_started()
        use_gpus([requested[i] for i in whole.gpus])
        devices = devices if isinstance(devices, int) else None
    return whole, resolve(devices, default_cpus)


def _check_not_started() -> None:
    if has_started():
        raise ClusterError(
            "TensorFlow is already initialized, so this process can no longer connect to other "
            "workers. Call tfdist.strategies.create('multi_worker') before the first operation "
            "(such as building a model), and pass the strategy to the Trainer. Or create the "
            "Trainer first, and pass it the function that builds the model."
        )


def _silent(workers: Cluster) -> list[int]:
    """Returns the ranks of the other workers whose server does not respond."""
    others = {i: address for i, address in enumerate(workers.addresses) if i != workers.rank}
    return liveness.silent(others)
