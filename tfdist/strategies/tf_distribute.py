"""What the strategies that stand on a `tf.distribute.Strategy` share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies import batches, copies
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.collectives.fusion import by_dtype, fused
from tfdist.strategies.collectives.wire_dtypes import wire_dtype
from tfdist.upstream.tensorflow_data import OnDevices


class TFDistribute(Strategy):
    """Replicas in one process, run by a `tf.distribute.Strategy`, each over its own `copies`.

    Variables are never made in TensorFlow's scope: a model with its distributed variables, and an
    optimizer that reduces by itself, would be no plain ones to anybody else.

    Args:
        devices: Of this process, one a replica.
        tf_strategy: Made for these devices.
        prefetch_to_device: Whether shares are copied to their devices ahead of the step; None:
            where the devices are GPUs (on CPUs the copy only costs).
    """

    default_cpus = 2

    def __init__(
        self,
        devices: Sequence[str],
        tf_strategy: tf.distribute.Strategy,
        prefetch_to_device: bool | None = None,
    ) -> None:
        self.devices = list(devices)
        self.tf_strategy = tf_strategy
        self._places = list(tf_strategy.extended.worker_devices)
        # Where each replica's copies are; the first has the variables themselves.
        others = self._places[1:]
        self._copies = ["", *(others if self.has_local_variables else [""] * len(others))]
        self._prefetch = (
            devices[0].startswith("GPU") if prefetch_to_device is None else prefetch_to_device
        )

    def sync_copies(self, variables: Sequence[keras.Variable]) -> None:
        copies.make_equal(variables, [device for device in self._copies if device])

    @property
    def _is_handed_out(self) -> bool:
        """Whether shares are copied to their devices ahead; one replica has no shares."""
        return self._prefetch and self.num_replicas > 1

    def distribute(
        self, dataset: tf.data.Dataset, own_rows: bool = False, whole: bool = False
    ) -> Any:
        if not self._is_handed_out:
            return super().distribute(dataset, own_rows, whole)

        def one_by_one(element: batches.Element) -> tf.data.Dataset:
            rows, checksum, by_replica = element
            stream = tf.data.Dataset.from_tensors((rows, checksum, by_replica[0]))
            for share in by_replica[1:]:
                more = tf.data.Dataset.from_tensors((rows, checksum, share))
                stream = stream.concatenate(more)
            return stream

        elements = super().distribute(dataset, own_rows, whole)
        by_replica = elements.flat_map(one_by_one).prefetch(tf.data.AUTOTUNE)
        return OnDevices(by_replica, self._places)

    def unpack(self, element: Any) -> batches.Element:
        if not self._is_handed_out:
            return super().unpack(element)
        rows, checksum, _ = element[0]
        return batches.Element(rows, checksum, [share for _, _, share in element])

    def run(self, fn: ReplicaFn) -> Any:
        def on_replica() -> Any:
            context = tf.distribute.get_replica_context()
            number = int(tf.get_static_value(context.replica_id_in_sync_group))
            index = number - self.first_replica
            with copies.on(self._copies[index]):
                return fn(index)

        with copies.found():
            return self.tf_strategy.run(on_replica)

    def local_results(self, results: Any) -> list[Any]:
        by_replica = [self.tf_strategy.experimental_local_results(r) for r in _leaves(results)]
        # What is the same object on all replicas comes back as one.
        return [
            tf.nest.pack_sequence_as(results, [leaf[i if leaf[1:] else 0] for leaf in by_replica])
            for i in range(len(self.devices))
        ]

    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        returned = []
        with copies.found():
            for index, result in enumerate(self.local_results(results)):
                with tf.device(self._places[index]), copies.on(self._copies[index]):
                    returned.append(fn(result))
        return returned

    @property
    def _uses_nccl(self) -> bool:
        """Whether NCCL sums tensors over the replicas."""
        return False

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        context = tf.distribute.get_replica_context()
        sent = [_cast(t, wire_dtype(t.dtype, self._uses_nccl)) for t in tensors]
        # NCCL and hierarchical copies concatenate the tensors of a call, which has to be of one
        # dtype therefore.
        exchange = functools.partial(self._exchange, context, op)
        reduced = fused(functools.partial(by_dtype, exchange), sent)
        return [_cast(r, t.dtype) for r, t in zip(reduced, tensors, strict=True)]

    def _exchange(self, context: Any, op: str, packed: list) -> list:
        """All-reduces few large tensors of one dtype at once."""
        if any(isinstance(tensor, tf.IndexedSlices) for tensor in packed):
            return context.all_reduce(op, packed)

        @tf.custom_gradient
        def summed(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list]]:
            # Stopped, or TensorFlow looks for variables in all that led to the sums, on all
            # replicas, at each exchange again: a network's first step took quadratic time.
            sums = context.all_reduce(op, [tf.stop_gradient(tensor) for tensor in tensors])
            gradient = functools.partial(self._exchange, context, op)
            return [tf.stop_gradient(s) for s in sums], lambda *upstream: gradient([*upstream])

        return tf.nest.flatten(summed(*packed))


def _cast(tensor: Any, dtype: tf.DType) -> Any:
    """Returns a dense tensor or `tf.IndexedSlices` in a dtype; itself if it has it."""
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


def _leaves(structure: Any) -> list[Any]:
    """Leaves, where a value per replica (a composite tensor itself) is one."""
    return tf.nest.flatten(structure, expand_composites=False)
