"""Channel split of one process: the layers of a model in parts, each on a device of its own.

Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism", section 3). There is one replica, which has all rows; what differs
from one device is where a layer's channels are computed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.devices import resolve
from tfdist.errors import ConfigurationError
from tfdist.strategies import batches
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.placement import colocate_with_inputs
from tfdist.strategies.tensor_parallel import rules, table
from tfdist.strategies.tensor_parallel.calls import Calls
from tfdist.strategies.tensor_parallel.layout import Layout, layout
from tfdist.strategies.tensor_parallel.rules import Rules
from tfdist.strategies.tensor_parallel.split import Cut
from tfdist.upstream import keras_model, keras_variables
from tfdist.upstream.keras_callbacks import swap_by_assignment
from tfdist.upstream.keras_optimizers import refuse_elsewhere, slots_of
from tfdist.upstream.keras_variables import ShardedGradient, ShardedVariable
from tfdist.upstream.tensorflow_tapes import know_parts

#: Where a model is made, and what is no weight stays: no device has to hold all of it.
_HOST = "CPU:0"


class TensorParallelOfProcess(Strategy):
    """Layers split by channels, heads or columns over the devices of a process.

    Args:
        devices: As of `TensorParallel`.
        layout: As there.
        smallest: As there.

    Raises:
        ConfigurationError: Fewer than two devices, or a rule that is none.
        DeviceError: A device that does not exist.
    """

    name = "tensor_parallel"
    default_cpus = 2
    has_local_variables = False

    def __init__(
        self,
        devices: int | str | Sequence[str] | None,
        layout: Rules | None,
        smallest: int,
    ) -> None:
        self.devices = resolve(devices, self.default_cpus)
        if len(self.devices) < 2:
            raise ConfigurationError(
                f"strategy 'tensor_parallel' splits layers over devices, but got {self.devices[0]} "
                "alone: use devices=2 or more, or strategy 'one_device'."
            )
        self.layout = None if layout is None else dict(rules.checked(layout))
        self._smallest = 1 if layout is not None else smallest
        self._layouts: weakref.WeakKeyDictionary[keras.Model, Layout]
        self._layouts = weakref.WeakKeyDictionary()
        self._rows = {"split": "told when the shapes of the data are known"}
        swap_by_assignment()
        know_parts()

    @property
    def num_replicas(self) -> int:
        """One: it has all rows, and parts of the layers on each device."""
        return 1

    @property
    def num_local_replicas(self) -> int:
        return 1

    def describe(self) -> dict[str, str]:
        rows = super().describe() | {"shard policy": "each device has all rows of a batch"}
        return rows | self._rows

    @contextmanager
    def scope(self) -> Iterator[None]:
        with tf.device(_HOST):
            yield

    def place(self, model: Any) -> None:
        if model.built:
            optimizer = getattr(model, "optimizer", None)
            self._arrange(model, [optimizer] if optimizer is not None else [])

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        cut = self._arrange(model, optimizers)
        plain = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
        weights = {id(v) for v in model.variables}
        for slot, weight in (pair for optimizer in plain for pair in slots_of(optimizer)):
            if id(weight) in cut and slot.shape == weight.shape:
                _cut(Cut(slot, cut[id(weight)].division), self.devices)
            elif id(weight) in weights:
                self._put(slot)
        for optimizer in plain if cut else ():
            refuse_elsewhere(optimizer, keras_variables.ELSEWHERE)

    def _arrange(self, model: keras.Model, optimizers: Sequence[Any]) -> Mapping[int, Cut]:
        """Gives each device its parts of the weights, and the first one what is whole."""
        plain = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
        found = layout(
            model, plain, len(self.devices), self.layout, self._smallest, self._layouts.get(model)
        )
        self._layouts[model] = found
        self._rows = table.rows(model, found, self.devices)
        cut = {id(own.variable): own for split in found.splits for own in split.cuts}
        for variable in model.variables:
            if id(variable) in cut:
                _cut(cut[id(variable)], self.devices)
            elif keras.backend.is_float_dtype(variable.dtype):  # seeds and counters are the host's
                self._put(variable)
        gc.collect()  # what was whole may hang on cycles, which Python breaks up when it likes
        return cut

    def _put(self, variable: keras.Variable) -> None:
        """Puts a variable onto the first device as a whole."""
        if isinstance(variable, ShardedVariable):  # it could be cut before
            keras_variables.unite(variable, _HOST)
        keras_model.move(variable, self.devices[0])

    def run(self, fn: ReplicaFn) -> Any:
        known = list(self._layouts.values())
        splits = [split for layout in known for split in layout.splits]
        following = [layer for layout in known for layer in layout.following]
        with Calls(self.devices).instead(splits, following):
            return super().run(fn)

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor, sources: Sequence[Any]) -> list:
        flat = tf.nest.flatten(sources)
        # Those of a graph are on the devices of the forward pass, unlike a tape's.
        of_graph = not tf.executing_eagerly()
        found = tf.gradients(loss, flat) if of_graph else tape.gradient(loss, flat)
        return [_of_all(g) for g in tf.nest.pack_sequence_as(list(sources), found)]

    def reduce_sharded(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        return {i: ShardedGradient(g) for i, g in gradients.items() if isinstance(g, tuple)}

    def update(self, fn: Callable[[Any], Any], results: Any) -> list[Any]:
        if tf.executing_eagerly():
            return [fn(results)]
        with tf.compat.v1.device(colocate_with_inputs):
            return [fn(results)]

    def outputs(
        self, fn: Callable[[batches.Batch], Any], element: batches.Element, whole: bool = False
    ) -> list[Any]:
        del whole  # the one replica has all rows
        return self.local_results(self.run(lambda i: fn(element.shares[i].rows)))


def _cut(own: Cut, devices: Sequence[str]) -> None:
    """Cuts a variable, where it is not cut that way already."""
    variable = own.variable
    if isinstance(variable, ShardedVariable):
        if variable.division == own.division:
            return
        keras_variables.unite(variable, _HOST)
    keras_variables.divide(variable, own.division, devices, keep_whole=False)


def _of_all(gradient: Any) -> Any:
    """Returns a gradient; None where no part has one."""
    if isinstance(gradient, ShardedGradient) and all(piece is None for piece in gradient):
        return None
    return gradient
