"""A pipeline of one process: the layers of a model over its devices, micro-batches in flight.

A micro-batch is to the step what a replica's share is: losses, metrics, masks, totals and states
add up as they do there. What is new is where an operation computes, and in which order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.devices import resolve
from tfdist.errors import ConfigurationError
from tfdist.strategies import STRATEGIES, shares
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.beside_inputs import beside_inputs
from tfdist.strategies.collectives.local_sum import local_sum
from tfdist.strategies.pipeline import calls, table, timeline, timing
from tfdist.strategies.pipeline.order import Order
from tfdist.strategies.pipeline.stages import Stages, into_stages
from tfdist.strategies.pipeline.tracing import Tracing
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
        plot_stages: As there.

    Raises:
        ConfigurationError: Numbers that do not go together.
        DeviceError: A device that does not exist.
    """

    name = "pipeline"
    default_cpus = 2
    has_local_variables = False

    def __init__(
        self,
        devices: int | str | Sequence[str] | None = None,
        stages: int | None = None,
        micro_batches: int = 4,
        order: str = "gpipe",
        cut_at: str | Sequence[str] | None = None,
        balance: str = "parameters",
        plot_stages: str | None = None,
    ) -> None:
        STRATEGIES["pipeline"].check(order=order, balance=balance)
        self.cut_at = _names(cut_at)
        num_stages = _num_stages(stages, self.cut_at, micro_batches)
        self.devices = resolve(num_stages if devices is None else devices, self.default_cpus)
        if num_stages not in (None, len(self.devices)):
            raise ConfigurationError(
                f"strategy 'pipeline' has one device a stage, but {num_stages} stages were asked "
                f"for on {', '.join(self.devices)}: use as many devices, or leave one of both out."
            )
        self.micro_batches, self.order, self.balance = micro_batches, order, balance
        self.plot_stages = plot_stages
        self._threads = ReplicaThreads()
        self._stage_of: weakref.WeakKeyDictionary[keras.Operation, int]
        self._stage_of = weakref.WeakKeyDictionary()
        self._tracing: Tracing | None = None
        self._known: weakref.WeakKeyDictionary[keras.Model, Stages] = weakref.WeakKeyDictionary()
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

    @contextmanager
    def scope(self) -> Iterator[None]:
        with tf.device(_HOST):
            yield

    def place(self, model: Any) -> None:
        if not model.built:
            return
        self.stages = found = self._cut(model)
        for operation, stage in zip(found.operations, found.numbers, strict=True):
            self._stage_of[operation] = stage
        homes = self._homes()
        for weights in found.weights():
            for weight in weights:
                if keras.backend.is_float_dtype(weight.dtype):  # seeds and counters are the host's
                    move(weight, homes[id(weight)])

    def _cut(self, model: keras.Model) -> Stages:
        """Returns the stages of a model, the same as long as it has the same layers."""
        calls.check_steps(model)
        operations = calls.of_model(model)
        known = self._known.get(model)
        if known is not None and [*map(id, known.operations)] == [*map(id, operations)]:
            return known
        seconds = self._measured(model, operations) if self.balance == "time" else None
        self._known[model] = found = into_stages(model, len(self.devices), self.cut_at, seconds)
        if self.plot_stages is not None:
            timeline.draw(found, self.micro_batches, self.order, Path(self.plot_stages))
        return found

    def _measured(self, model: keras.Model, operations: Sequence[Any]) -> list[float]:
        """Returns the seconds that each operation takes."""
        return timing.seconds(model, operations, self.devices[0], _HOST)

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        self.place(model)
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
                return self._threads.run(fn, [self.devices[-1]] * self.micro_batches, self._add_up)
        finally:
            self._tracing = None  # it holds the tensors of the graph

    def local_results(self, results: list[Any]) -> list[Any]:
        return results

    def outputs(
        self, fn: Callable[[shares.Batch], Any], element: shares.Element, whole: bool = False
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
        with tf.compat.v1.device(beside_inputs):
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


def _names(cut_at: str | Sequence[str] | None) -> list[str]:
    names = cut_at.split(",") if isinstance(cut_at, str) else list(cut_at or ())
    return [name.strip() for name in names]


def _num_stages(stages: int | None, cut_at: Sequence[str], micro_batches: int) -> int | None:
    """Returns how many stages are asked for, if any number is.

    Raises:
        ConfigurationError: Numbers that are none, or do not go together.
    """
    for name, value, least in (("stages", stages, 2), ("micro_batches", micro_batches, 1)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigurationError(f"{name}={value!r}: expected a number from {least}.")
    if cut_at and stages not in (None, len(cut_at) + 1):
        raise ConfigurationError(
            f"cut_at={','.join(cut_at)} makes {len(cut_at) + 1} stages, but stages={stages}: leave "
            "stages out."
        )
    return len(cut_at) + 1 if cut_at else stages
