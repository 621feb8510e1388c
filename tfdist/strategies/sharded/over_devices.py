"""Sharded over the devices of one process: towers of which each device keeps its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies import copies
from tfdist.strategies.base import ReplicaFn
from tfdist.strategies.collectives.local_sum import local_sum
from tfdist.strategies.sharded.division import OverDevices
from tfdist.strategies.sharded.parts import Parts
from tfdist.strategies.towers import Towers
from tfdist.upstream import keras_model
from tfdist.upstream.keras_variables import ShardedGradient, ShardedVariable

_HOME = "_tfdist_home"  # of a weight: the device that has its state, where it is not cut


class ShardedOverDevices(Parts, Towers):
    """Synchronous replicas in one process, each device the owner of a part of the state.

    Args:
        devices: As `tfdist.devices.resolve` takes them; one replica, and one part, on each.
        shard: As of `Sharded`.
        smallest: As there.
        offload: As there.
    """

    def __init__(
        self,
        devices: int | str | Sequence[str] | None,
        shard: str,
        smallest: int,
        offload: str,
    ) -> None:
        super().__init__(devices)
        self.parameter_device = self.devices[0]
        self.divide_over(self.devices, shard, smallest, offload)
        self._division = OverDevices(len(self.devices))

    def describe(self) -> dict[str, str]:
        rows = super().describe()
        del rows["parameters on"]
        return rows

    def division_of(self, variable: keras.Variable) -> OverDevices:
        del variable
        return self._division

    def keep_whole(
        self, weight: keras.Variable, slots: Sequence[keras.Variable], owner: str
    ) -> None:
        super().keep_whole(weight, slots, owner)
        setattr(weight, _HOME, owner)
        for variable in slots if self.copies_weights else [weight, *slots]:
            keras_model.move(variable, owner)

    def run(self, fn: ReplicaFn) -> list[Any]:
        if not self.copies_weights:
            return super().run(fn)

        def on_tower(index: int) -> Any:
            with copies.on(self.devices[index] if index else ""):
                return fn(index)

        with copies.found():
            return super().run(on_tower)

    def sync_copies(self, variables: Sequence[keras.Variable]) -> None:
        if self.copies_weights:
            weights = [v for v in variables if _has_copies(v)]
            copies.make_equal(weights, self.devices[1:])
        super().sync_copies(variables)

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        super().after_update(variables)
        for weight in variables if self.copies_weights else ():
            if _has_copies(weight):
                for device, copy in copies.of(weight.value).items():
                    with tf.device(device):
                        copy.assign(weight.value.read_value())

    def reduce_sharded(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums each gradient where its variable's state is: of the parts, each on its device."""
        own = {}
        for place, gradient in gradients.items() if self.shard != "optimizer" else ():
            variable = variables[place]
            if isinstance(gradient, tf.IndexedSlices):
                continue
            if isinstance(variable, ShardedVariable):
                pieces = zip(variable.cut(gradient), self.devices, strict=True)
                own[place] = ShardedGradient(_sent(piece, device) for piece, device in pieces)
            elif hasattr(variable, _HOME):
                own[place] = _sent(gradient, getattr(variable, _HOME))
        sums = self._threads.exchange(tf.nest.flatten(own)) if own else []
        return tf.nest.pack_sequence_as(own, sums)

    def _add_up(self, asked: list[list]) -> list:
        """Sums over the towers, tensor by tensor, where the first tower's is."""
        results = []
        for terms in zip(*asked, strict=True):
            with tf.device(terms[0].device):
                results.append(local_sum(terms))
        return results


def _has_copies(variable: keras.Variable) -> bool:
    """Whether this is a weight that `prepare` has given its place."""
    is_cut = isinstance(variable, ShardedVariable) and variable.is_whole
    return is_cut or hasattr(variable, _HOME)


def _sent(tensor: tf.Tensor, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.identity(tensor)
