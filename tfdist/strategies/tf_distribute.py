"""What the strategies that stand on a `tf.distribute.Strategy` share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfdist.strategies import shares
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.collectives.fusion import fused


def _with_equal_copies(next_creator: Callable[..., Any], **options: Any) -> Any:
    """Creates a variable of which every copy is written by us, with the same value.

    TensorFlow's own per-replica variables (Keras's metrics) and its refusal of variables without
    an aggregation (BatchNorm under central storage) are for writers inside a replica; ours write
    in `update`, so that any copy is the whole truth.
    """
    options["synchronization"] = tf.VariableSynchronization.AUTO
    options["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return next_creator(**options)


class TFDistribute(Strategy):
    """Replicas in one process, run by a `tf.distribute.Strategy`.

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
        self._prefetch = (
            devices[0].startswith("GPU") if prefetch_to_device is None else prefetch_to_device
        )

    @contextmanager
    def scope(self) -> Iterator[None]:
        with self.tf_strategy.scope(), tf.variable_creator_scope(_with_equal_copies):
            yield

    def owns(self, variable: tf.Variable) -> bool:
        return self.tf_strategy.extended.variable_created_in_scope(variable)

    def distribute(
        self, dataset: tf.data.Dataset, own_rows: bool = False, whole: bool = False
    ) -> Any:
        if not self._prefetch:
            return super().distribute(dataset, own_rows, whole)

        def one_by_one(element: shares.Element) -> tf.data.Dataset:
            rows, checksum, by_replica = element
            stream = tf.data.Dataset.from_tensors((rows, checksum, by_replica[0]))
            for share in by_replica[1:]:
                more = tf.data.Dataset.from_tensors((rows, checksum, share))
                stream = stream.concatenate(more)
            return stream

        # TensorFlow hands consecutive elements to consecutive replicas, each on its device.
        elements = super().distribute(dataset, own_rows, whole)
        return self.tf_strategy.distribute_datasets_from_function(
            lambda context: elements.flat_map(one_by_one).prefetch(tf.data.AUTOTUNE)
        )

    def unpack(self, element: Any) -> shares.Element:
        if not self._prefetch:
            return super().unpack(element)
        by_replica = self.local_results(element)
        rows, checksum, _ = by_replica[0]
        return shares.Element(rows, checksum, [share for _, _, share in by_replica])

    def run(self, fn: ReplicaFn) -> Any:
        def on_replica() -> Any:
            context = tf.distribute.get_replica_context()
            number = int(tf.get_static_value(context.replica_id_in_sync_group))
            return fn(number - self.first_replica)

        return self.tf_strategy.run(on_replica)

    def local_results(self, results: Any) -> list[Any]:
        by_replica = [self.tf_strategy.experimental_local_results(r) for r in _leaves(results)]
        return [
            tf.nest.pack_sequence_as(results, [leaf[i] for leaf in by_replica])
            for i in range(len(self.devices))
        ]

    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        def on_copy(_: tf.Variable, result: Any) -> Any:
            return fn(result)

        returned = self.tf_strategy.extended.update(
            self._anchor, on_copy, args=(results,), group=False
        )
        return list(self.tf_strategy.experimental_local_results(returned))

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        context = tf.distribute.get_replica_context()
        # TensorFlow keeps int32 on the host and refuses it in one exchange with the rest.
        movable = [tf.cast(t, tf.int64) if t.dtype == tf.int32 else t for t in tensors]
        reduced = fused(lambda packed: self._exchange(context, op, packed), movable)
        return [
            tf.cast(r, t.dtype) if r.dtype != t.dtype else r
            for r, t in zip(reduced, tensors, strict=True)
        ]

    def _exchange(self, context: Any, op: str, packed: list) -> list:
        """All-reduces few large tensors at once."""
        return context.all_reduce(op, packed)

    def prepare(self, model: Any, optimizer: Any) -> None:
        # Any variable with a copy a device will do: `update` finds the devices through it.
        self._anchor = model.variables[0].value
        super().prepare(model, optimizer)


def _leaves(structure: Any) -> list[Any]:
    """Leaves, where a value per replica (a composite tensor itself) is one."""
    return tf.nest.flatten(structure, expand_composites=False)
