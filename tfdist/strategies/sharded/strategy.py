"""Sharded: towers of which each device keeps its part of optimizer state, gradients and weights.

Data parallelism as in `towers`, in the manner of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models"). What of a weight is computed element by
element is cut into a part a device; what is not (a table of embeddings, matrices of Muon) is whole
on one device, each on the one that has least so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.strategies import STRATEGIES, copies
from tfdist.strategies.base import ReplicaFn
from tfdist.strategies.collectives.local_sum import local_sum
from tfdist.strategies.sharded import plan
from tfdist.strategies.sharded.division import OverDevices
from tfdist.strategies.towers import Towers
from tfdist.upstream import keras_variables
from tfdist.upstream.keras_callbacks import swap_by_assignment
from tfdist.upstream.keras_optimizers import refuse_elsewhere, slots_of
from tfdist.upstream.keras_variables import GradientParts, VariableOfParts

_HOME = "_tfdist_home"  # of a weight: the device that has its state, where it is not cut


class Sharded(Towers):
    """Synchronous replicas, each the owner of a part of the state.

    Args:
        devices: As `tfdist.devices.resolve` takes them; one replica, and one part, on each.
        shard: What is divided: `"optimizer"`: its state (ZeRO 1); `"gradients"`: that, and the
            sums of gradients (ZeRO 2); `"parameters"`: those, and the weights (ZeRO 3), which are
            gathered where they are read.
        smallest: Elements of a weight below which it is not cut, but given to one device.

    Raises:
        ConfigurationError: Another `shard`.
        DeviceError: A device that does not exist.
    """

    name = "sharded"

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        shard: str = "parameters",
        smallest: int = 1024,
    ) -> None:
        STRATEGIES["sharded"].check(shard=shard)
        super().__init__(devices)
        self.parameter_device = self.devices[0]
        self.shard = shard
        self._smallest = max(smallest, len(self.devices))
        self._division = OverDevices(len(self.devices))
        self._copies_weights = shard != "parameters"
        self._placed: dict[str, str] = {}
        swap_by_assignment()

    def describe(self) -> dict[str, str]:
        rows = super().describe()
        del rows["parameters on"]
        return rows | {"sharded": plan.WHAT[self.shard]} | self._placed

    def place(self, model: keras.Model) -> None:
        if not model.built or model.optimizer is None:
            return
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        planned = plan.plan(model, [optimizer], self.devices, self._smallest)
        self._placed = {"split": planned.describe(len(self.devices))}
        if (state := plan.state_of(optimizer)) is not None:
            held = planned.bytes_by_device(self.devices, state, self._copies_weights)
            each = ", ".join(f"{device} {num / 1e6:,.1f} MB" for device, num in held.items())
            self._placed["weights and optimizer state"] = each

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        super().prepare(model, optimizers)
        plain = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
        planned = plan.plan(model, plain, self.devices, self._smallest)
        slots: dict[int, list[keras.Variable]] = {}
        for slot, weight in (pair for optimizer in plain for pair in slots_of(optimizer)):
            slots.setdefault(id(weight), []).append(slot)
        for weight in planned.cut:
            self._cut(weight, slots.get(id(weight), []))
        for weight, home in planned.homes:
            self._place(weight, slots.get(id(weight), []), home)
        for optimizer in plain if planned.cut else ():
            refuse_elsewhere(optimizer, keras_variables.ELSEWHERE)
        if self._copies_weights:
            self.take_over(model.variables)

    def _cut(self, weight: keras.Variable, slots: list[keras.Variable]) -> None:
        """Gives each device its part of a weight's state."""
        if not isinstance(weight, VariableOfParts):
            keras_variables.divide(weight, self._division, self.devices, self._copies_weights)
        for slot in slots:
            if not isinstance(slot, VariableOfParts) and slot.shape == weight.shape:
                keras_variables.divide(slot, self._division, self.devices, keep_whole=False)

    def _place(self, weight: keras.Variable, slots: list[keras.Variable], home: str) -> None:
        """Gives one device the whole state of a weight."""
        for variable in [weight, *slots]:
            if isinstance(variable, VariableOfParts):  # it could be cut before
                keras_variables.unite(variable, self.devices[0])
        setattr(weight, _HOME, home)
        for variable in slots if self._copies_weights else [weight, *slots]:
            keras_variables.move(variable, home)

    def run(self, fn: ReplicaFn) -> list[Any]:
        if not self._copies_weights:
            return super().run(fn)

        def on_tower(index: int) -> Any:
            with copies.on(self.devices[index] if index else ""):
                return fn(index)

        with copies.found():
            return super().run(on_tower)

    def take_over(self, variables: Sequence[keras.Variable]) -> None:
        if self._copies_weights:
            weights = [v for v in variables if _is_weight(v)]
            copies.make_equal(weights, self.devices[1:])
            for weight in weights:
                if isinstance(weight, VariableOfParts):
                    weight.assign_parts(weight.value)

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        for weight in variables if self._copies_weights else ():
            if not _is_weight(weight):
                continue
            if isinstance(weight, VariableOfParts):
                weight.value.assign(weight.joined())
            for device, copy in copies.of(weight.value).items():
                with tf.device(device):
                    copy.assign(weight.value.read_value())

    def sum_in_parts(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums each gradient where its variable's state is: of the parts, each on its device."""
        own = {}
        for place, gradient in gradients.items() if self.shard != "optimizer" else ():
            variable = variables[place]
            if isinstance(gradient, tf.IndexedSlices):
                _check_is_whole(variable)
            elif isinstance(variable, VariableOfParts):
                pieces = zip(variable.cut(gradient), self.devices, strict=True)
                own[place] = GradientParts(_sent(piece, device) for piece, device in pieces)
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


def _is_weight(variable: keras.Variable) -> bool:
    """Whether this is one that `prepare` has given its place."""
    is_cut = isinstance(variable, VariableOfParts) and variable.is_whole
    return is_cut or hasattr(variable, _HOME)


def _check_is_whole(table: keras.Variable) -> None:
    if isinstance(table, VariableOfParts):
        raise UnsupportedModelError(
            f"{table.path!r} is a table that no Embedding holds, and its gradients of rows cannot "
            "be cut: use keras.layers.Embedding, strategy 'towers', or Sharded(smallest=N) with "
            f"more than its {table.shape.num_elements()} elements."
        )


def _sent(tensor: tf.Tensor, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.identity(tensor)
