"""The evaluation step: loss and metrics of one global batch, without training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.patches.keras_patches import keras_patched
from tfdist.replica.options import StepOptions
from tfdist.step.forward_backward import ReplicaOutputs, forward
from tfdist.step.replica_runner import ReplicaRunner
from tfdist.step.state import ForwardState
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share


class EvaluateStep:
    """Loss and metrics of a global batch; implements `strategies.inner_loop.Step`.

    Args:
        model: A built and compiled model.
        strategy: Runs the replicas and sums what they compute.
        state: The variables of the model that a forward pass may change.
        options: The options of the step; evaluation ignores those of training.
        full_batch_reason: Why every replica computes the full batch; None if each computes its
            own part of it.
        results: Returns the logs; None: those of the model's metrics.
    """

    training = False

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        state: ForwardState,
        options: StepOptions,
        full_batch_reason: str | None = None,
        results: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._model, self._strategy, self._state = model, strategy, state
        self._results = results or model.get_metrics_result
        self._options = dataclasses.replace(options, sync_batch_norm=False, remat="none")
        compute = functools.partial(forward, model, state)
        self._replicas = ReplicaRunner(strategy, compute, 1, model.jit_compile, full_batch_reason)
        self._update = self._replicas.update_function(self._apply)

    def __call__(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        with keras_patched(self._model, self._options):
            sums = self._replicas.all_reduced(total_rows, shares)
        return self._strategy.update(self._update, sums)

    def _apply(self, sums: ReplicaOutputs) -> tf.Tensor:
        """Updates one copy of the variables; returns a tensor that is ready once that is done."""
        self._state.commit(sums.state)
        return self._state.commit_metrics(sums.metrics)

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the metrics over all steps since their last reset."""
        return self._results()
