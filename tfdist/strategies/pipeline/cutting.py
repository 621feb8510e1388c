"""Cutting models into stages as it is asked, each model once."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import keras

from tfdist.strategies.pipeline import bubble, calls, memory, timeline, timing
from tfdist.strategies.pipeline.stages import Costs, Stages, into_stages


@dataclasses.dataclass
class Cutting:
    """How models are cut.

    Attributes:
        devices: One a stage; on the first one layers are measured.
        host: Where weights are until the stages are known.
        micro_batches: As of `Pipeline`.
        order: As there.
        cut_at: As there, names.
        balance: As there.
        balance_rows: As there.
        plot_stages: As there.
        agreed: Makes of measurements those that all processes go by.
    """

    devices: Sequence[str]
    host: str
    micro_batches: int
    order: str
    cut_at: Sequence[str]
    balance: str
    balance_rows: int
    plot_stages: str | None
    agreed: Callable[[list[float]], list[float]]

    def __post_init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[keras.Model, Stages] = weakref.WeakKeyDictionary()

    def stages_of(self, model: keras.Model) -> Stages:
        """Returns the stages of a model, the same as long as it has the same layers.

        Raises:
            UnsupportedModelError: It cannot be cut so.
            ConfigurationError: A name that no layer has, or inputs of an unknown shape.
        """
        calls.check_steps(model)
        operations = calls.of_model(model)
        known = self._known.get(model)
        if known is not None and [*map(id, known.operations)] == [*map(id, operations)]:
            return known
        costs = self._costs(model, operations)
        self._known[model] = found = into_stages(model, len(self.devices), self.cut_at, costs)
        if self.plot_stages is not None:
            timeline.draw(found, self.micro_batches, self.order, Path(self.plot_stages))
        return found

    def _costs(self, model: keras.Model, operations: Sequence[keras.Operation]) -> Costs | None:
        """What is to be balanced; None: parameters."""
        num_stages = len(self.devices)
        if self.balance == "time":
            seconds = timing.seconds(model, operations, self.devices[0], self.host)
            return Costs("time", [self.agreed(seconds)] * num_stages)
        if self.balance == "memory":
            held = memory.held(model, operations, self.balance_rows)
            kept = bubble.in_memory(num_stages, self.micro_batches, self.order)
            by_stage = [[own.weights + num * own.activations for own in held] for num in kept]
            return Costs("memory", by_stage)
        return None
