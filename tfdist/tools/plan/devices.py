"""Predicts the memory of each device in a training step, by strategy."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import keras

from tfdist import devices, strategies
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.sharded.plan import num_bytes, tensors_of
from tfdist.tools.plan import graph, liveness, step_graph
from tfdist.tools.plan.network import Network
from tfdist.tools.plan.step_graph import StepGraph
from tfdist.upstream.keras_optimizers import optimizers_of

#: The host, whose memory is not predicted. The devices of a split model are CPU:1, CPU:2, ...
_HOST = "CPU:0"


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
            low, high = (
                (middle, high) if self._fits(middle * self.unit, capacity) else (low, middle)
            )
        return low * self.unit

    def _fits(self, batch: int, capacity: int) -> bool:
        return batch < 1 << 30 and all(device.total <= capacity for device in self.devices(batch))


class ReplicatedStep:
    """The step of one replica, for all strategies whose replicas have the whole model.

    Args:
        network: The network to train.

    Attributes:
        weights: Bytes of the model's variables.
        gradients: Bytes of the gradients.
        optimizer: Bytes of the optimizer's variables.

    Raises:
        UnsupportedModelError: The graph depends on the batch size.
    """

    def __init__(self, network: Network) -> None:
        model, few = step_graph.trace(network, step_graph.FEW_ROWS, OneDevice(1))
        _, more = step_graph.trace(network, step_graph.MORE_ROWS, OneDevice(1))
        step_graph.check_same_operations(network, few, more)
        self._graph = StepGraph(graph.on_one_device(few), graph.on_one_device(more))
        self._order = graph.execution_order(self._graph.few)
        self._weight_sizes = [num_bytes(variable) for variable in model.variables]
        self._optimizer_sizes = [num_bytes(variable) for variable in _state(model)]
        self.weights, self.optimizer = sum(self._weight_sizes), sum(self._optimizer_sizes)
        self.gradients = sum(map(num_bytes, model.trainable_variables))
        self._peaks: dict[tuple[int, bool], int] = {}

    def peak(self, num_rows: int, updates: bool) -> int:
        """Returns the peak of a step in bytes.

        Args:
            num_rows: Rows of the replica.
            updates: Whether the optimizer's variables and the update are on this device.
        """
        key = num_rows, updates
        if key not in self._peaks:
            variables = self._weight_sizes + (self._optimizer_sizes if updates else [])
            order = self._order if updates else self._before_update()
            operations = self._graph.operations(num_rows)
            self._peaks[key] = liveness.peaks(operations, order, {"": variables})[""].num_bytes
        return self._peaks[key]

    def _before_update(self) -> list[str]:
        """Returns the operations up to the last gradient."""
        gradients = [i for i, name in enumerate(self._order) if name.startswith("gradient_tape/")]
        return self._order[: gradients[-1] + 1]


class ReplicaPlanner(Planner):
    """Predicts memory for data-parallel strategies, whose replicas have the whole model.

    Args:
        step: The step of a replica.
        strategy: Name of the strategy.
        num_devices: Number of replicas of all workers.
        num_servers: Number of parameter servers.
    """

    def __init__(
        self, step: ReplicatedStep, strategy: str, num_devices: int, num_servers: int = 1
    ) -> None:
        self._step, self._strategy, self._num_servers = step, strategy, num_servers
        self.unit = 1 if strategy == "one_device" else num_devices

    def devices(self, batch: int) -> list[DeviceMemory]:
        """See the base class."""
        step, rows = self._step, math.ceil(batch / self.unit)
        if self._strategy == "one_device":
            return [self._replica("the device", step.peak(rows, True))]
        if self._strategy in ("mirrored", "multi_worker", "horovod"):
            # After the backward pass, memory contains the all-reduced gradients in addition.
            exchange = step.weights + step.optimizer + 2 * step.gradients
            return [self._replica("each device", max(step.peak(rows, True), exchange))]
        activations = max(0, step.peak(rows, False) - step.weights - step.gradients)
        replica = DeviceMemory("each replica", step.weights, step.gradients, 0, activations)
        if self._strategy == "parameter_server":
            return [replica, self._server("each server", self._num_servers, 1)]
        return [replica, self._server("parameter device", 1, self.unit)]

    def _replica(self, role: str, peak: int) -> DeviceMemory:
        parts = (self._step.weights, self._step.gradients, self._step.optimizer)
        return DeviceMemory(role, *parts, max(0, peak - sum(parts)))

    def _server(self, role: str, num_servers: int, num_gradients: int) -> DeviceMemory:
        step = self._step
        gradients = num_gradients * step.gradients
        return DeviceMemory(
            role, step.weights // num_servers, gradients // num_servers,
            step.optimizer // num_servers, 0,
        )  # fmt: skip


class SplitPlanner(Planner):
    """Predicts memory for strategies that split one model over devices, from the graph of a step.

    The step is traced under the strategy, on logical CPU devices, with the strategy's stages,
    shards and order of micro-batches.

    Args:
        network: The network to train.
        strategy: Name of the strategy.
        num_devices: Number of stages, shards or replicas.
        options: Options of the strategy.

    Raises:
        DeviceError: TensorFlow is already initialized with fewer logical devices.
        UnsupportedModelError: The strategy does not support the network.
    """

    def __init__(
        self,
        network: Network,
        strategy: str,
        num_devices: int,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        one_stage_each = strategy == "pipeline" and options.get("order") != "interleaved"
        self._role = "stage" if one_stage_each else "device"
        self._devices = make_devices(num_devices)

        def trace(rows_per_unit: int) -> Any:
            created = strategies.create(strategy, self._devices, **options)
            self.unit = created.num_replicas
            if options.get("split_activations") == "rows":
                self.unit *= num_devices
            model, operations = step_graph.trace(network, rows_per_unit * self.unit, created)
            # TensorFlow places operations without a device on the first one.
            return model, {
                name: operation if operation.device else operation._replace(device=self._devices[0])
                for name, operation in operations.items()
            }

        model, few = trace(step_graph.FEW_ROWS)
        _, more = trace(step_graph.MORE_ROWS)
        step_graph.check_same_operations(network, few, more)
        rows = (step_graph.FEW_ROWS * self.unit, step_graph.MORE_ROWS * self.unit)
        self._graph = StepGraph(few, more, rows)
        self._order = graph.execution_order(graph.with_transfers(few))
        trainable = model.trainable_variables
        self._weights = {device: _sizes_on(device, model.variables) for device in self._devices}
        self._optimizer = {device: _sizes_on(device, _state(model)) for device in self._devices}
        # With sharded data parallelism, each replica computes the gradients of all weights.
        all_gradients = sum(map(num_bytes, trainable)) if strategy == "sharded" else None
        self._gradients = {
            device: sum(_sizes_on(device, trainable)) if all_gradients is None else all_gradients
            for device in self._devices
        }
        self._planned: dict[int, list[DeviceMemory]] = {}

    def devices(self, batch: int) -> list[DeviceMemory]:
        """See the base class; the batch is rounded up to a multiple of `unit`."""
        num_rows = self.unit * math.ceil(batch / self.unit)
        if num_rows not in self._planned:
            operations = graph.with_transfers(self._graph.operations(num_rows))
            variables = {d: self._weights[d] + self._optimizer[d] for d in self._devices}
            peaks = liveness.peaks(operations, self._order, {_HOST: [], **variables})
            self._planned[num_rows] = [
                self._device(f"{self._role} {number}", device, peaks[device].num_bytes)
                for number, device in enumerate(self._devices, 1)
            ]
        return self._planned[num_rows]

    def bytes_received(self, batch: int) -> dict[str, int]:
        """Returns the bytes that each device receives from others in a step, by its name."""
        received = dict.fromkeys(self._devices, 0)
        for operation in graph.with_transfers(self._graph.operations(batch)).values():
            if operation.kind == "Receive" and operation.device in received:
                received[operation.device] += operation.sizes[0]
        return received

    def _device(self, role: str, device: str, peak: int) -> DeviceMemory:
        weights, optimizer = sum(self._weights[device]), sum(self._optimizer[device])
        gradients = self._gradients[device]
        activations = max(0, peak - weights - optimizer - gradients)
        return DeviceMemory(role, weights, gradients, optimizer, activations)


def make_devices(num_devices: int) -> list[str]:
    """Creates the logical CPU devices for `SplitPlanner` and returns their names.

    Raises:
        DeviceError: TensorFlow is already initialized with fewer logical devices.
    """
    return devices.resolve([f"CPU:{number}" for number in range(1, num_devices + 1)], 1)


def _state(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the model's optimizers."""
    return [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]


def _sizes_on(device: str, variables: Iterable[keras.Variable]) -> list[int]:
    """Returns the bytes of each variable, replica copy and shard on a device."""
    tensors = (tensor for variable in variables for tensor in tensors_of(variable))
    return [num_bytes(t) for t in tensors if graph.short_name(t.device) == device]
