"""The step that evaluates: loss and metrics of a global batch; nothing is trained."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.step.forward_backward import ReplicaOutputs, forward
from tfdist.step.keras_patches import keras_patched
from tfdist.step.replica_runner import ReplicaRunner
from tfdist.step.shared_trace import Packed
from tfdist.step.state import ForwardState
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share


class EvaluateStep:
    """Loss and metrics of a global batch; see `strategies.inner_loop.Step`.

    Args:
        model: Built and compiled.
        strategy: Computes the replicas' shares.
        state: Of the model.
        full_batch_reason: As of `ReplicaRunner`.
    """

    training = False

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        state: ForwardState,
        full_batch_reason: str | None = None,
    ) -> None:
        self._model, self._strategy, self._state = model, strategy, state
        compute = functools.partial(forward, model, state)
        self._replicas = ReplicaRunner(strategy, compute, 1, model.jit_compile, full_batch_reason)

    def __call__(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        with keras_patched(self._model, sync_batch_norm=False):
            sums = self._replicas.summed(total_rows, shares)
        return self._strategy.update(self._apply, sums)

    def _apply(self, packed: ReplicaOutputs | Packed) -> tf.Tensor:
        """Changes one copy of the variables; returns a tensor that is ready thereafter."""
        sums = self._replicas.unpacked(packed)
        self._state.commit(sums.state)
        return self._state.commit_metrics(sums.metrics)

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the metrics over all steps since they were reset."""
        return self._model.get_metrics_result()
