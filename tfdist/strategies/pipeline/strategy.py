"""Pipeline parallelism: the layers of a model over devices, with micro-batches in flight.

A micro-batch is to the step what a per-replica batch is: losses, metrics, masks and states are
summed in the same way. What differs is where an operation runs, and in which order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.remote import connection
from tfdist.devices import colocate_with_inputs
from tfdist.groups import agreement
from tfdist.groups.base import ProcessGroup
from tfdist.groups.fusion import by_device, local_sum
from tfdist.strategies import STRATEGIES, batches
from tfdist.strategies.base import ReplicaFn, Strategy, join_processes
from tfdist.strategies.feed import Feed
from tfdist.strategies.pipeline import planning
from tfdist.strategies.pipeline.planning import StagePlanner
from tfdist.strategies.pipeline.schedule import Order, device_of
from tfdist.strategies.pipeline.stages import Stages, refused_custom_step
from tfdist.strategies.pipeline.tracing import Tracing
from tfdist.strategies.replica_threads import ReplicaThreads
from tfdist.strategies.variables import VariableLayout
from tfdist.upstream.keras_layers import frozen_weights, operations_called_through
from tfdist.upstream.keras_model import move, values_chosen_by
from tfdist.upstream.keras_optimizers import slots_of


class Pipeline(Strategy):
    """A model in stages, each with its weights and optimizer state on a device of its own.

    Each of several processes has a pipeline with all stages and computes its part of each batch.
    The sums of a stage are exchanged from the stage's own device.

    Example:
        >>> from tfdist.strategies.pipeline.strategy import Pipeline
        >>> trainer = tfdist.Trainer(build_model, strategy=Pipeline(2, micro_batches=8))
        >>> trainer.strategy.micro_batches
        8

    Args:
        devices: As for `tfdist.devices.resolve`, one for each stage; None: all of this process.
        stages: The number of stages; None: the number of devices (twice as many if interleaved), or
            as `cut_at` implies.
        micro_batches: The number of micro-batches of a process's part of a batch.
        order: `"gpipe"`, `"1f1b"`, `"interleaved"` or `"zb"`: see `schedule`.
        cut_at: Names of the layers after which a stage ends, as a sequence or separated by commas;
            None: choose balanced stages.
        balance: What to balance over the stages: `"parameters"`; or `"memory"`: weights, their
            optimizer state and gradients, and the activations kept for the backward pass.
        balance_rows: Rows of a micro-batch, for `"memory"`.
        process_group: What exchanges sums between processes: `"horovod"`, `"tensorflow"`, or
            `"auto"`, which is Horovod.

    Raises:
        ConfigurationError: Options that contradict each other, or differ between processes.
        DeviceError: A device that does not exist.
        MissingError: Several processes, and Horovod is not installed.
    """

    name = "pipeline"
    default_cpus = 2
    variables: StagedVariables

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        stages: int | None = None,
        micro_batches: int = 4,
        order: str = "gpipe",
        cut_at: str | Sequence[str] | None = None,
        balance: str = "parameters",
        balance_rows: int = 8,
        process_group: str = "auto",
    ) -> None:
        STRATEGIES["pipeline"].check(order=order, balance=balance, process_group=process_group)
        layers = planning.layer_names(cut_at)
        num_stages = planning.requested_stages(stages, layers)
        planning.check_at_least(1, micro_batches=micro_batches, balance_rows=balance_rows)
        several = order == "interleaved"  # stages per device
        requested = num_stages if devices is None and not several else devices
        names, group = join_processes(process_group, requested, self.default_cpus)
        self.num_stages = planning.stages_on(len(names), num_stages, micro_batches, order)
        self.micro_batches, self.order = micro_batches, order
        planner = StagePlanner(
            len(names), self.num_stages, micro_batches, order, layers, balance, balance_rows
        )
        micro = ("micro-batches", "micro_batches")
        feed = Feed(names, group, micro_batches, micro)
        super().__init__(names, group, StagedVariables(names, group, planner), feed)
        if group.size > 1:
            agreement.check_same_count(group, micro_batches, *micro)
        self._threads = ReplicaThreads()
        self._tracing: Tracing | None = None

    def describe(self) -> dict[str, str]:
        rows = super().describe()
        del rows["replicas"]
        return rows | planning.describe(
            self.variables.stages, self.devices, self.num_stages, self.micro_batches, self.order
        )

    def check_custom_step(self, step: str) -> None:
        raise refused_custom_step(step)

    def run(self, fn: ReplicaFn) -> list[Any]:
        order = Order(self.order, self.num_stages, self.micro_batches, len(self.devices))
        homes = self.variables.stage_devices()
        self._tracing = Tracing(self.variables.stages_of, homes, order, self._threads.index)
        try:
            tracing = self._tracing
            with operations_called_through(tracing.call), values_chosen_by(tracing.value):
                last = [self.devices[-1]] * self.micro_batches
                results = self._threads.run(fn, last, self._sum)
            order.connect()
            return results
        finally:
            self._tracing = None  # it holds the tensors of the graph

    def local_results(self, results: list[Any]) -> list[Any]:
        return results

    def outputs(
        self, fn: Callable[[batches.Batch], Any], element: batches.Element, whole: bool = False
    ) -> list[Any]:
        if not whole:
            return super().outputs(fn, element)
        return self.run(lambda i: None if i else fn(element.shares[0].rows))[:1]

    def gradients(
        self, tape: tf.GradientTape, loss: tf.Tensor, sources: Sequence[Any], alone: bool = False
    ) -> list:
        if tf.executing_eagerly() or self._tracing is None:
            return super().gradients(tape, loss, sources)
        if self.order == "gpipe" and not alone:  # trace all forward passes before any backward pass
            self._threads.exchange([tf.constant(0)])
        return self._tracing.gradients(loss, sources)

    def update(self, fn: Callable[[Any], Any], results: list[Any]) -> list[Any]:
        if tf.executing_eagerly():
            return [fn(results[0])]
        with tf.compat.v1.device(colocate_with_inputs):
            return [fn(results[0])]

    def all_reduce(self, tensors: list) -> list:
        return self._threads.exchange(tensors) if tensors else []

    def _sum(self, terms_by_micro_batch: list[list]) -> list:
        """Sums over micro-batches and processes, each tensor on its own device."""
        sums = []
        # In full-batch mode, only the first micro-batch computes.
        for terms in zip(*filter(None, terms_by_micro_batch), strict=True):
            first = terms[0].values if isinstance(terms[0], tf.IndexedSlices) else terms[0]
            with tf.device(first.device):
                total = self._tracing.sum_of(terms) if self._tracing else None
                sums.append(local_sum(terms) if total is None else total)
        return by_device(self.group.all_reduce, sums) if self.group.size > 1 else sums


class StagedVariables(VariableLayout):
    """The variables of each stage of a pipeline, on the device of the stage.

    Attributes:
        stages: The stages of the model; None: the shapes of the data are not known yet.
        stages_of: The stages of the calls of each operation, in order.
    """

    are_local = False

    def __init__(self, devices: Sequence[str], group: ProcessGroup, planner: StagePlanner) -> None:
        super().__init__(devices, group)
        self._planner = planner
        self.stages_of: weakref.WeakKeyDictionary[keras.Operation, list[int]]
        self.stages_of = weakref.WeakKeyDictionary()
        self.stages: Stages | None = None

    def scope(self) -> AbstractContextManager[Any]:
        return connection.spread(self._devices, connection.on_this_host("CPU:0"))

    def place(self, model: Any) -> None:
        if not model.built:
            return
        self.stages = stages = self._planner.stages_of(model)
        self.stages_of.update(stages.stages_of_calls())
        homes, quantized = self._homes(), {id(v) for v in frozen_weights(model)}
        for weight in (weight for weights in stages.weights() for weight in weights):
            # Seeds and counters stay on the host.
            if keras.backend.is_float_dtype(weight.dtype) or id(weight) in quantized:
                move(weight, homes[id(weight)])

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        self.place(model)
        homes = self._homes()
        for optimizer in optimizers:
            for slot, weight in slots_of(optimizer):
                if id(weight) in homes:
                    move(slot, homes[id(weight)])
        super().prepare(model, optimizers)

    def place_of(self, variable: keras.Variable, index: int) -> str:
        return variable.value.device

    def _homes(self) -> dict[int, str]:
        weights = [] if self.stages is None else self.stages.weights()
        return {
            id(weight): device
            for device, variables in zip(self.stage_devices(), weights, strict=False)
            for weight in variables
        }

    def stage_devices(self) -> list[str]:
        """Returns the device of each stage."""
        num = len(self._devices)
        return [self._devices[device_of(stage, num)] for stage in range(self._planner.num_stages)]
