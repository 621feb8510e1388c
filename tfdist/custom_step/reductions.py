"""Reduction inference for custom steps: which of their values are a mean or a sum over rows.

The static analysis of the traced step (`traced_step.py`) decides that for all weights and rows, or
the step gets full batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfdist.custom_step.traced_step import TracedStep
from tfdist.custom_step.trial import BuiltStep, StepFn
from tfdist.rows.reductions import NotReducibleError, Reduction
from tfdist.step.loss_scaling import Scaling
from tfdist.strategies import batches


@dataclass
class ReductionPlan:
    """The reductions of everything that a custom step computes.

    Attributes:
        logs: Those of the step's results, by name.
        full_batch_reason: Why every replica computes the full batch; None if each computes its
            own part of it.
        gradients: Those of gradients, in the order in which the step computes them.
        alike: For each gradient, the places of variables for which all replicas look up the same
            rows, so that the batch has these slices once. Other slices are concatenated.
        states: Those of the changes of variables, by id.
    """

    logs: dict[str, Reduction]
    full_batch_reason: str | None = None
    gradients: list[Reduction] = field(default_factory=list)
    alike: list[frozenset[int]] = field(default_factory=list)
    states: dict[int, Reduction] = field(default_factory=dict)

    @classmethod
    def of_full_batch(cls, logs: Sequence[str], reason: str | None) -> ReductionPlan:
        """Returns the plan of a step that every replica computes for the full batch."""
        return cls(dict.fromkeys(logs, Reduction.SAME), reason)

    def digest(self) -> float:
        """Returns a checksum, to compare the plans of workers, which may have different rows."""
        kinds = [*self.logs.items(), *self.gradients, *self.states.values()]
        alike = [sorted(places) for places in self.alike]
        return float(zlib.crc32(repr((self.full_batch_reason is None, kinds, alike)).encode()))


def infer_reductions(
    model: keras.Model,
    built: BuiltStep,
    step: StepFn,
    scalings: Mapping[int, Scaling],
    batch: Any,
) -> ReductionPlan:
    """Infers the reductions of a step.

    Args:
        model: A built model.
        built: What `trial.build` found.
        step: Its `train_step` or `test_step`.
        scalings: The scaling of each optimizer that scales its loss, by id.
        batch: The first global batch, for its shapes and dtypes.

    Raises:
        UnsupportedModelError: The step is not supported in full-batch mode either.
    """
    try:
        if found := batches.uneven(batch):
            raise NotReducibleError(found)
        if any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(batch)):
            raise NotReducibleError("its input is sparse")
        traced = TracedStep(model, built.variables, step, scalings, batch)
        return ReductionPlan(
            {name: traced.log(name) for name in built.logs},
            gradients=[traced.gradient(i) for i in range(traced.num_gradients)],
            alike=[traced.alike(i) for i in range(traced.num_gradients)],
            states={id(variable): traced.state(variable) for variable in traced.assigned},
        )
    except NotReducibleError as error:
        return ReductionPlan.of_full_batch(built.logs, error.reason)
