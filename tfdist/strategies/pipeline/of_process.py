"""A pipeline of one process: the layers of a model over its devices, micro-batches in flight.

A micro-batch is to the step what a replica's share is: losses, metrics, masks, totals and states
add up as they do there. What is new is where an operation computes, and in which order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.devices import resolve
from tfdist.errors import ConfigurationError
from tfdist.strategies import STRATEGIES, batches
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.collectives.local_sum import local_sum
from tfdist.strategies.pipeline import asked, table
from tfdist.strategies.pipeline.cutting import Cutting
from tfdist.strategies.pipeline.measured_bubble import MeasuredBubble
from tfdist.strategies.pipeline.order import Order
from tfdist.strategies.pipeline.stages import Stages
from tfdist.strategies.pipeline.tracing import Tracing
from tfdist.strategies.placement import colocate_with_inputs
from tfdist.strategies.replica_threads import ReplicaThreads
from tfdist.upstream.keras_graph import operations_called_through
from tfdist.upstream.keras_model import move
from tfdist.upstream.keras_optimizers import slots_of

#: Where weights are until the stages are known.
_HOST = "CPU:0"


class PipelineOfProcess(Strategy):
    """A model in stages, each with its weights and its optimizer's slots on a device of its own.

    Args:
        devices: One a stage.
        stages: As of `Pipeline`.
        micro_batches: As there.
        order: As there.
        cut_at: As there.
        balance: As there.
        balance_rows: As there.
        plot_stages: As there.

    Raises:
        ConfigurationError: Numbers that do not go together.
        DeviceError: A device that does not exist.
    """

    name = "pipeline"
    default_cpus = 2
    has_local_variables = False
    shares_are = ("micro-batches", "micro_batches")

    def __init__(
        self,
        devices: int | str | Sequence[str] | None,
        stages: int | None,
        micro_batches: int,
        order: str,
        cut_at: str | Sequence[str] | None,
        balance: str,
        balance_rows: int,
        plot_stages: str | None,
    ) -> None:
        STRATEGIES["pipeline"].check(order=order, balance=balance)
        names = asked.names(cut_at)
        num_stages = asked.num_stages(stages, names)
        asked.check_numbers(micro_batches=micro_batches, balance_rows=balance_rows)
        self.devices = resolve(num_stages if devices is None else devices, self.default_cpus)
        if num_stages not in (None, len(self.devices)):
            raise ConfigurationError(
                f"strategy 'pipeline' has one device a stage, but {num_stages} stages were asked "
                f"for on {', '.join(self.devices)}: use as many devices, or leave one of both out."
            )
        self.micro_batches, self.order = micro_batches, order
        self.cutting = Cutting(
            self.devices, _HOST, micro_batches, order, names, balance, balance_rows, plot_stages,
            self.agreed,
        )  # fmt: skip
        self.measured_bubble = MeasuredBubble(len(self.devices), micro_batches)
        self._threads = ReplicaThreads()
        self._stage_of: weakref.WeakKeyDictionary[keras.Operation, int]
        self._stage_of = weakref.WeakKeyDictionary()
        self._tracing: Tracing | None = None
        self.stages: Stages | None = None

    @property
    def num_replicas(self) -> int:
        """Number of micro-batches, which are to the step what replicas are."""
        return self.micro_batches

    @property
    def num_local_replicas(self) -> int:
        return self.micro_batches

    def describe(self) -> dict[str, str]:
        rows = super().describe()
        del rows["replicas"]
        return rows | table.rows(self.stages, self.devices, self.micro_batches, self.order)

    def summary(self) -> dict[str, str]:
        return table.waited(self.measured_bubble.share())

    @contextmanager
    def scope(self) -> Iterator[None]:
        with tf.device(_HOST):
            yield

    def place(self, model: Any) -> None:
        if not model.built:
            return
        self.stages = found = self.cutting.stages_of(model)
        for operation, stage in zip(found.operations, found.numbers, strict=True):
            self._stage_of[operation] = stage
        homes = self._homes()
        for weights in found.weights():
            for weight in weights:
                if keras.backend.is_float_dtype(weight.dtype):  # seeds and counters are the host's
                    move(weight, homes[id(weight)])

    def agreed(self, seconds: list[float]) -> list[float]:
        """Returns the measurements by which models are cut."""
        return seconds

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        self.place(model)
        self.measured_bubble.prepare()
        homes = self._homes()
        for optimizer in optimizers:
            for slot, weight in slots_of(optimizer):
                if id(weight) in homes:
                    move(slot, homes[id(weight)])

    def run(self, fn: ReplicaFn) -> list[Any]:
        order = Order(self.order, len(self.devices), self.micro_batches)
        self._tracing = Tracing(self._stage_of, self.devices, order, self._threads.index)
        try:
            with operations_called_through(self._tracing.call):
                last = [self.devices[-1]] * self.micro_batches
                results = self._threads.run(fn, last, self._add_up)
            self.measured_bubble.note(self._tracing.inputs(), order)
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

    def gradients(self, tape: tf.GradientTape, loss: tf.Tensor, sources: Sequence[Any]) -> list:
        if tf.executing_eagerly() or self._tracing is None:
            return super().gradients(tape, loss, sources)
        if self.order == "gpipe":  # no way back is traced before all have gone forward
            self._threads.exchange([tf.constant(0)])
        return self._tracing.gradients(loss, sources)

    def update(self, fn: Callable[[Any], Any], results: list[Any]) -> list[Any]:
        if tf.executing_eagerly():
            return [fn(results[0])]
        with tf.compat.v1.device(colocate_with_inputs):
            return [fn(results[0])]

    def all_reduce(self, tensors: list, op: str = "SUM") -> list:
        sums = self._threads.exchange(tensors) if tensors else []
        return sums if op == "SUM" else [total / self.num_replicas for total in sums]

    def place_of(self, variable: keras.Variable, index: int) -> str:
        return variable.value.device

    def _add_up(self, asked: list[list]) -> list:
        """Sums over the micro-batches, each tensor on its own device: gradients stay there."""
        sums = []
        for terms in zip(*asked, strict=True):
            first = terms[0].values if isinstance(terms[0], tf.IndexedSlices) else terms[0]
            with tf.device(first.device):
                known = self._tracing.sum_of(terms) if self._tracing else None
                sums.append(local_sum(terms) if known is None else known)
        return sums

    def _homes(self) -> dict[int, str]:
        """Returns the device of each weight, by its id."""
        weights = [] if self.stages is None else self.stages.weights()
        return {
            id(weight): device
            for device, own in zip(self.devices, weights, strict=False)
            for weight in own
        }
