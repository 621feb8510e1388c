"""Predicts the memory of each device in a training step, by strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tfdist import devices, strategies
from tfdist.memory import DeviceMemory, Planner, StepGraph, StepPlanner, optimizer_state
from tfdist.memory.graph import HOST
from tfdist.model_setup import create
from tfdist.replica.replica import StepOptions
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.sharded.plan import num_bytes
from tfdist.tools.plan.network import Workload
from tfdist.upstream.keras_variables import weights_as_shapes


class ReplicatedStep:
    """The step of one replica, for all strategies whose replicas have the whole model.

    Its weights are shapes only: a model larger than this machine can be planned.

    Args:
        workload: What is trained.
        remat, offload_activations: As for `Trainer`.
        on_cpu: Whether it is planned for CPUs instead of GPUs.

    Attributes:
        weights: Bytes of the model's variables.
        gradients: Bytes of the gradients.
        optimizer: Bytes of the optimizer's variables.
        largest_weight: Bytes of the largest variable.

    Raises:
        UnsupportedModelError: The memory of the model cannot be predicted.
    """

    def __init__(
        self,
        workload: Workload,
        remat: str = "none",
        offload_activations: bool = False,
        on_cpu: bool = False,
    ) -> None:
        strategy = OneDevice(1)
        options = StepOptions(
            precision=workload.precision, remat=remat, offload_activations=offload_activations
        )
        with weights_as_shapes():
            model = create.create(workload.build, strategy, workload.precision)
            self._graph = StepGraph(
                model, strategy, options, workload.batch, one_device=True, on_cpu=on_cpu
            )
        self._weight_sizes = [num_bytes(variable) for variable in model.variables]
        self._optimizer_sizes = [num_bytes(variable) for variable in optimizer_state(model)]
        self.weights, self.optimizer = sum(self._weight_sizes), sum(self._optimizer_sizes)
        self.gradients = sum(map(num_bytes, model.trainable_variables))
        self.largest_weight = max(self._weight_sizes, default=0)
        self._peaks: dict[tuple[int, bool], int] = {}

    def seconds(self, num_rows: int, flops: float, bandwidth: float) -> float:
        """Returns the compute time of a step by the roofline of each operation.

        Args:
            num_rows: Rows of the replica.
            flops: Operations per second of matrix products.
            bandwidth: Bytes per second of the device's memory.
        """
        operations = self._graph.operations(num_rows)
        moved = 0.0
        for one in operations.values():
            if not one.alias and not one.uncounted:
                read = sum(
                    operations[name].sizes[i] for name, i in one.inputs if name in operations
                )
                moved += max((read + sum(one.sizes)) / bandwidth, one.flops / flops)
        return moved

    def offloaded(self, num_rows: int) -> int:
        """Returns the bytes of activations that are copied to the host."""
        operations = self._graph.operations(num_rows)
        return sum(
            one.sizes[0] for one in operations.values()
            if one.device == HOST and one.kind == "IdentityN"
        )  # fmt: skip

    def peak(self, num_rows: int, updates: bool = True) -> int:
        """Returns the peak of a step in bytes.

        Args:
            num_rows: Rows of the replica.
            updates: Whether the optimizer's variables and the update are on this device.
        """
        key = num_rows, updates
        if key not in self._peaks:
            variables, order = self._weight_sizes, self._graph.order
            if updates:
                variables = variables + self._optimizer_sizes
            else:  # the operations up to the last gradient
                is_gradient = [name.startswith("gradient_tape/") for name in order]
                order = order[: len(order) - is_gradient[::-1].index(True)]
            peaks = self._graph.peaks(num_rows, {"": variables}, order)
            self._peaks[key] = peaks[""].num_bytes
        return self._peaks[key]


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


def split_planner(
    workload: Workload,
    strategy: str,
    num_devices: int,
    options: Mapping[str, Any] = MappingProxyType({}),
    **of_step: Any,
) -> StepPlanner:
    """Returns the planner of a strategy that splits one model over logical CPU devices.

    Args:
        workload: What is trained.
        strategy: Name of the strategy.
        num_devices: Number of stages, shards or replicas.
        options: Options of the strategy.
        **of_step: As for `ReplicatedStep`.

    Raises:
        DeviceError: TensorFlow is already initialized with fewer logical devices.
        UnsupportedModelError: The strategy does not support the model.
    """
    created = strategies.create(strategy, make_devices(num_devices), **options)
    model = create.create(workload.build, created, workload.precision)
    one_stage_each = strategy == "pipeline" and options.get("order") != "interleaved"
    unit = created.num_replicas
    if options.get("split_activations") == "rows":
        unit *= num_devices
    step = StepOptions(precision=workload.precision, **of_step)
    role = "stage" if one_stage_each else "device"
    return StepPlanner(model, created, step, workload.batch, role, unit)


def make_devices(num_devices: int) -> list[str]:
    """Creates the logical CPU devices for `split_planner` and returns their names.

    Raises:
        DeviceError: TensorFlow is already initialized with fewer logical devices.
    """
    return devices.resolve([f"CPU:{number}" for number in range(1, num_devices + 1)], 1)
