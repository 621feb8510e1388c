"""Strategies on top of a `tf.distribute.Strategy`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.groups.base import LocalGroup, ProcessGroup
from tfdist.groups.buckets import GradientExchange
from tfdist.groups.fusion import by_dtype, fused, wire_dtype
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.feed import DevicePrefetch
from tfdist.strategies.mirrored_variables import MirroredVariables, on_device, read_local
from tfdist.strategies.variables import VariableLayout
from tfdist.upstream.tensorflow_random import RandomStates


class TFDistribute(Strategy):
    """Replicas of one process run by a `tf.distribute.Strategy`, each with a set of variables.

    Variables are never created in TensorFlow's scope: with its distributed variables, and an
    optimizer that reduces by itself, the model would not be a plain Keras model for others.

    Args:
        devices: The devices of this process, one for each replica.
        tf_strategy: TensorFlow's strategy for these devices.
        prefetch_to_device: Whether per-replica batches are copied to their devices ahead of the
            step; None: if the devices are GPUs (on CPUs the copy has no benefit).
        group: The processes that train together; None: this process alone.
        variables: Where variables are; None: on the device of each replica.
        exchange: How gradients are sent between processes; None: all at once.
    """

    default_cpus = 2

    def __init__(
        self,
        devices: Sequence[str],
        tf_strategy: tf.distribute.Strategy,
        prefetch_to_device: bool | None = None,
        group: ProcessGroup | None = None,
        variables: VariableLayout | None = None,
        exchange: GradientExchange | None = None,
    ) -> None:
        self.tf_strategy = tf_strategy
        self._places = list(tf_strategy.extended.worker_devices)
        group = LocalGroup() if group is None else group
        if prefetch_to_device is None:
            prefetch_to_device = devices[0].startswith("GPU")
        feed = None
        if prefetch_to_device and len(devices) * group.size > 1:
            feed = DevicePrefetch(devices, group, self._places)
        # The device of each replica's mirrored variables; empty: the replica uses the model's own.
        self._copies = [""] * len(devices)
        if variables is None:
            self._copies[1:] = self._places[1:]
            variables = MirroredVariables(devices, group, self._places[1:])
        super().__init__(devices, group, variables, feed, exchange)

    def run(self, fn: ReplicaFn) -> Any:
        # The replicas run in turns. Python code draws the same numbers on every one of them, and
        # goes on from the first.
        states = after = RandomStates.current()

        def on_replica() -> Any:
            nonlocal after
            context = tf.distribute.get_replica_context()
            number = int(tf.get_static_value(context.replica_id_in_sync_group))
            index = number - self.first_replica
            states.restore()
            with on_device(self._copies[index]):
                result = fn(index)
            after = after if index else RandomStates.current()
            return result

        with read_local():
            results = self.tf_strategy.run(on_replica)
        after.restore()
        return results

    def local_results(self, results: Any) -> list[Any]:
        # A per-replica value, itself a composite tensor, is one leaf.
        by_replica = [
            self.tf_strategy.experimental_local_results(r)
            for r in tf.nest.flatten(results, expand_composites=False)
        ]
        # An object that all replicas share is returned once.
        return [
            tf.nest.pack_sequence_as(results, [leaf[i if leaf[1:] else 0] for leaf in by_replica])
            for i in range(len(self.devices))
        ]

    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        returned = []
        with read_local():
            for index, result in enumerate(self.local_results(results)):
                with (
                    tf.device(self._places[index]),
                    on_device(self._copies[index]),
                ):
                    returned.append(fn(result))
        return returned

    @property
    def _uses_nccl(self) -> bool:
        """Whether NCCL sums tensors over the replicas."""
        return False

    def all_reduce(self, tensors: list) -> list:
        if self.num_replicas == 1:
            return tensors
        context = tf.distribute.get_replica_context()
        sent = [tf.cast(t, wire_dtype(t.dtype, self._uses_nccl)) for t in tensors]
        # NCCL and hierarchical copies concatenate the tensors of a call, which has to be of one
        # dtype therefore.
        exchange = functools.partial(self._exchange, context)
        states = RandomStates.current()
        reduced = fused(functools.partial(by_dtype, exchange), sent)
        states.restore()
        return [tf.cast(r, t.dtype) for r, t in zip(reduced, tensors, strict=True)]

    def _exchange(self, context: Any, packed: list) -> list:
        """Sums few large tensors of one dtype at once."""
        if any(isinstance(tensor, tf.IndexedSlices) for tensor in packed):
            # NCCL asks for the device of each dense tensor: what a loop returns names none.
            named = [t if isinstance(t, tf.IndexedSlices) else tf.identity(t) for t in packed]
            return context.all_reduce("SUM", named)

        @tf.custom_gradient
        def summed(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list]]:
            # Without the stop TensorFlow looks for variables in everything that led to the sums,
            # on all replicas, again at each exchange: the first step took quadratic time.
            sums = context.all_reduce("SUM", [tf.stop_gradient(tensor) for tensor in tensors])
            stopped = [tf.stop_gradient(s) for s in sums]
            return stopped, lambda *upstream: self._exchange(context, [*upstream])

        return tf.nest.flatten(summed(*packed))
