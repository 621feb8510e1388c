"""The memory of a training step on each device, for batches of any size, from its traced graph.

The step is traced twice, on small batches, and never run. The size of each tensor is extrapolated
linearly, because at most one of its axes is the batch.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.functions import CompiledFunctions
from tfdist.memory import graph, liveness
from tfdist.memory.graph import Operation
from tfdist.patches.remat import exact_remat
from tfdist.replica.replica import StepOptions
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Element, Share
from tfdist.strategies.sharded.plan import num_bytes, tensors_of
from tfdist.upstream.keras_optimizers import optimizers_of
from tfdist.upstream.patching import replaced

#: Rows per replica or micro-batch of the two traced batches. More than one, because an axis of size
#: one is broadcast.
FEW_ROWS, MORE_ROWS = 2, 4

#: Returns a batch, such as `(x, y)`, of a number of rows.
BatchOf = Callable[[int], Any]


class DeviceMemory(NamedTuple):
    """The memory of one device at the peak of a step, in bytes.

    Attributes:
        role: Description of the device.
        weights: Variables of the model, or the replica's copy of them.
        gradients: Gradients of the trainable variables, of all replicas that are summed on this
            device.
        optimizer: Variables of the optimizer.
        activations: Everything else: tensors of the forward pass, the backward pass and the update,
            and the overhead of the allocator.
    """

    role: str
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations


class Planner(abc.ABC):
    """Predicts the memory of the devices of one strategy.

    Attributes:
        unit: `largest_batch` tries multiples of this batch size.
    """

    unit: int

    @abc.abstractmethod
    def devices(self, batch: int) -> list[DeviceMemory]:
        """Returns the memory of each kind of device for a global batch, replicas first."""

    def largest_batch(self, capacity: int) -> int:
        """Returns the largest global batch that fits devices of `capacity` bytes; 0 for none."""
        low, high = 0, 1
        while self._fits(high * self.unit, capacity):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._fits(middle * self.unit, capacity)
            low, high = (middle, high) if fits else (low, middle)
        return low * self.unit

    def _fits(self, batch: int, capacity: int) -> bool:
        return batch < 1 << 30 and all(device.total <= capacity for device in self.devices(batch))


class StepGraph:
    """The operations of a step, for batches of any size.

    Args:
        model: A compiled model that was created in the strategy's scope.
        strategy: The strategy.
        options: Options of the step. Rounds of accumulation are not traced: see `StepPlanner`.
        batch: Returns batches; values do not matter.
        unit: The batch size is a multiple of this number.
        one_device: Whether the graph is that of a single device, with nothing between devices.
        on_cpu: As for `graph.execution_order`.

    Raises:
        UnsupportedModelError: The graph depends on the batch size, or has a loop of unknown length.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        options: StepOptions,
        batch: BatchOf,
        unit: int = 1,
        one_device: bool = False,
        on_cpu: bool = False,
    ) -> None:
        options = dataclasses.replace(options, accumulate=1)

        def operations(rows_per_unit: int) -> dict[str, Operation]:
            traced = _traced(model, strategy, options, batch(rows_per_unit * unit))
            if one_device:
                return graph.on_one_device(traced)
            # TensorFlow places operations without a device on the first one.
            first = graph.short_name(strategy.devices[0])
            return {
                name: op if op.device else op._replace(device=first) for name, op in traced.items()
            }

        self._few, self._more = operations(FEW_ROWS), operations(MORE_ROWS)
        self._rows = FEW_ROWS * unit, MORE_ROWS * unit
        if [op.kind for op in self._few.values()] != [op.kind for op in self._more.values()]:
            raise UnsupportedModelError(
                f"{model.name}: the graph of its step depends on the batch size, so the memory "
                "cannot be predicted. Measure it with tfdist tune batch-size."
            )
        self.order = graph.execution_order(graph.with_transfers(self._few), on_cpu)
        self._reads_ahead = strategy.feed.on_devices

    def peaks(
        self, num_rows: int, variables: Mapping[str, Sequence[int]], order: Sequence[str] = ()
    ) -> dict[str, liveness.Peak]:
        """Returns the peak of each device on a batch of `num_rows`.

        Args:
            num_rows: Rows of the batch.
            variables: For each device the bytes of each variable, in the order of their creation.
            order: The operations that run; by default, all.
        """
        operations = self.operations(num_rows)
        # A GPU reads the next batch during a step.
        ahead = graph.batch_on_devices(operations) if self._reads_ahead else {}
        kept = {device: [*sizes, *ahead.get(device, [])] for device, sizes in variables.items()}
        return liveness.peaks(operations, order or self.order, {graph.HOST: [], **kept})

    def operations(self, num_rows: int) -> dict[str, Operation]:
        """Returns the operations on a batch of `num_rows`, with copies between devices."""
        few_rows, more_rows = self._rows
        steps = (num_rows - few_rows) / (more_rows - few_rows)
        operations = {}
        for (name, few), more in zip(self._few.items(), self._more.values(), strict=True):
            pairs = zip(few.sizes, more.sizes, strict=True)
            sizes = [max(0, round(a + (b - a) * steps)) for a, b in pairs]
            flops = round(few.flops + (more.flops - few.flops) * steps)
            operations[name] = few._replace(sizes=sizes, flops=flops)
        return graph.with_transfers(operations)


class StepPlanner(Planner):
    """Predicts memory from the graph of a strategy's own step, with its stages, shards and copies.

    With gradient accumulation, a step has the tensors of one round, and the sums of the gradients.

    Args:
        model: A compiled model that was created in the strategy's scope.
        strategy: The strategy, on devices of this process.
        options: Options of the step.
        batch: Returns batches; values do not matter.
        role: What a device is called.
        unit: The batch size is a multiple of this number; None: of the number of replicas.

    Raises:
        UnsupportedModelError: The memory of the model cannot be predicted.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        options: StepOptions,
        batch: BatchOf,
        role: str = "device",
        unit: int | None = None,
    ) -> None:
        self.unit = (unit or strategy.num_replicas) * options.accumulate
        self._rounds, self._role = options.accumulate, role
        self._graph = StepGraph(model, strategy, options, batch, self.unit // self._rounds)
        self._devices = [graph.short_name(device) for device in strategy.devices]
        trainable, state = model.trainable_variables, optimizer_state(model)
        self._weights = {device: _sizes_on(device, model.variables) for device in self._devices}
        self._optimizer = {device: _sizes_on(device, state) for device in self._devices}
        gradients = sum(map(num_bytes, trainable))
        self._gradients = {
            device: min(gradients, sum(_sizes_on(device, trainable))) for device in self._devices
        }
        self._planned: dict[int, list[DeviceMemory]] = {}

    def devices(self, batch: int) -> list[DeviceMemory]:
        """See the base class; the batch is rounded up to a multiple of `unit`."""
        num_rows = self.unit * math.ceil(batch / self.unit) // self._rounds
        if num_rows not in self._planned:
            variables = {d: self._weights[d] + self._optimizer[d] for d in self._devices}
            peaks = self._graph.peaks(num_rows, variables)
            self._planned[num_rows] = [
                self._device(f"{self._role} {number}", device, peaks[device].num_bytes)
                for number, device in enumerate(self._devices, 1)
            ]
        return self._planned[num_rows]

    def _device(self, role: str, device: str, peak: int) -> DeviceMemory:
        weights, optimizer = sum(self._weights[device]), sum(self._optimizer[device])
        activations = max(0, peak - weights - optimizer - self._gradients[device])
        gradients = self._gradients[device] * (2 if self._rounds > 1 else 1)
        return DeviceMemory(role, weights, gradients, optimizer, activations)


def optimizer_state(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the model's optimizers."""
    return [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]


def zeros(spec: Any, num_rows: int) -> Any:
    """Returns a batch of zeros (empty strings).

    Args:
        spec: The batch as a structure of `tf.TensorSpec`s or Keras tensors, of any number of rows.
        num_rows: Its rows.

    Raises:
        ConfigurationError: Another axis than the first one has an unknown size.
    """

    def of_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        shape = [num_rows, *leaf.shape[1:]]
        if None in shape:
            raise ConfigurationError(
                f"the shape {tuple(leaf.shape)} of the data has an unknown size, so the memory "
                "cannot be predicted. Name the sizes with --input, or pass data of fixed shapes."
            )
        return tf.fill(shape, "") if leaf.dtype == "string" else tf.zeros(shape, leaf.dtype)

    return keras.tree.map_structure(of_leaf, spec)


def _traced(
    model: keras.Model, strategy: Strategy, options: StepOptions, batch: Any
) -> dict[str, Operation]:
    """Returns the operations of a step on a batch."""
    rows = tf.nest.flatten(batch)[0].shape[0]
    # A data set would make one tensor of a list of inputs.
    data = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(batch)).repeat()
    feed = DataHandler(strategy, data, training=True, steps_per_epoch=1)
    compiled: list[Any] = []
    compile_function = strategy.feed.compile

    def compile_and_keep(*arguments: Any, **options: Any) -> Any:
        compiled.append(compile_function(*arguments, **options))
        return compiled[-1]

    with replaced(strategy.feed, "compile", compile_and_keep):
        functions = CompiledFunctions(model, strategy, options)
        functions.train(feed)
        functions.sync_copies()  # creates the variables of the other replicas
    elements = strategy.feed.distribute(data, ahead=False)
    batches = iter(_of_static_sizes(elements, rows, strategy.num_replicas))
    with exact_remat():
        # Its graph is emptied when the function is deleted.
        function = compiled[-1].get_concrete_function(batches, tf.constant(1))
    devices = graph.variable_devices(function.graph)
    return graph.operations(graph.loop_body(function.graph), devices)


def _of_static_sizes(dataset: Any, num_rows: int, num_shares: int) -> Any:
    """Returns a distributed data set whose shares have static sizes, which the graph then has.

    Args:
        dataset: What `Feed.distribute` returns.
        num_rows: Rows of each batch, a multiple of `num_shares`.
        num_shares: Number of replicas or micro-batches.
    """
    if num_shares == 1:
        return dataset

    def static(tensor: Any) -> Any:
        return tf.ensure_shape(tensor, [num_rows // num_shares, *tensor.shape[1:]])

    def with_sizes(whole: Element) -> Element:
        shares = [
            Share(rows, tf.nest.map_structure(static, batch), first)
            for rows, batch, first in whole.shares
        ]
        return whole._replace(shares=tuple(shares))

    return dataset.map(tf.autograph.experimental.do_not_convert(with_sizes))


def _sizes_on(device: str, variables: Iterable[keras.Variable]) -> list[int]:
    """Returns the bytes of each variable, replica copy and shard on a device."""
    tensors = (tensor for variable in variables for tensor in tensors_of(variable))
    return [num_bytes(t) for t in tensors if graph.short_name(t.device) == device]
