"""The step that trains: what all shares contribute, and what an optimizer makes of the sums.

Each copy of the variables is changed alike: unscale -> finite? -> clip -> apply, the last two by
the Keras optimizer itself, just as on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.precision import Scaling
from tfdist.step.accumulation import GradientAccumulation
from tfdist.step.forward_backward import ReplicaOutputs, forward_backward
from tfdist.step.keras_patches import keras_patched
from tfdist.step.replica_runner import ReplicaRunner
from tfdist.step.shared_trace import Packed, SharedTrace
from tfdist.step.state import ForwardState
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share
from tfdist.upstream.keras_optimizers import optimizers_of_one_device


class TrainStep:
    """One optimizer step on a global batch; see `strategies.inner_loop.Step`.

    Args:
        model: Built and compiled.
        strategy: Computes the replicas' shares.
        state: Of the model.
        scaling: Of its loss.
        accumulate: Rounds in which a share is computed.
        sync_batch_norm: Whether BatchNorm takes the moments of the global batch.
        full_batch_reason: As of `ReplicaRunner`.
        recompute: Which layers are computed again on the way back, as of `Trainer`.

    Attributes:
        accumulation: The gradients that wait for batches to come, of an optimizer that
            accumulates them; None: it does not.
    """

    training = True

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        state: ForwardState,
        scaling: Scaling,
        accumulate: int = 1,
        sync_batch_norm: bool = False,
        full_batch_reason: str | None = None,
        recompute: str = "none",
    ) -> None:
        self._model, self._strategy, self._state, self._scaling = model, strategy, state, scaling
        self._sync_batch_norm, self._recompute = sync_batch_norm, recompute
        self._trainable = model.trainable_variables
        compute = functools.partial(
            forward_backward, strategy, model, self._trainable, state, scaling
        )
        self._replicas = ReplicaRunner(
            strategy, compute, accumulate, model.jit_compile, full_batch_reason, self._trainable
        )
        self._shared_trace: SharedTrace | None = None
        if strategy.one_trace_from is not None and strategy.num_local_replicas > 1:
            self._shared_trace = SharedTrace(self._apply, strategy.one_trace_from, writes=True)
        self.accumulation: GradientAccumulation | None = None
        if scaling.optimizer.gradient_accumulation_steps:
            self.accumulation = GradientAccumulation(strategy, scaling, self._trainable)

    def __call__(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        with keras_patched(self._model, self._sync_batch_norm, self._recompute):
            if self.accumulation is None:
                sums = self._replicas.summed(total_rows, shares)
            else:
                sums = self.accumulation.summed(self._replicas.local(total_rows, shares))
        return self._strategy.update(self._applied, sums)

    def _applied(self, sums: ReplicaOutputs | Packed) -> tf.Tensor:
        """Changes one copy of the variables; returns a tensor that is ready thereafter."""
        if self._shared_trace is None or tf.executing_eagerly():
            return self._apply(sums)
        done = self._shared_trace(sums)
        return self._apply(sums) if done is None else done

    def _apply(self, packed: ReplicaOutputs | Packed) -> tf.Tensor:
        """Does so in the graph or function that is traced."""
        sums = self._replicas.unpacked(packed)

        def commit(unscaled: list) -> None:
            # First the state: a layer may have assigned to a weight (SpectralNormalization),
            # of which the gradients are those of the new value.
            self._state.commit(sums.state)
            if self._trainable:
                with optimizers_of_one_device():
                    gradients = tf.nest.pack_sequence_as(in_order, unscaled)
                    self._scaling.optimizer.apply(gradients, self._trainable)
            self._strategy.after_update(self._model.variables)

        # A weight that is written while the backward pass still reads it is copied first. The group
        # keeps it at one edge for each gradient and each write, not one for each pair of them.
        backward_done = tf.group(*tf.nest.flatten(sums.gradients, expand_composites=True))
        with tf.control_dependencies([backward_done]):
            gradients = sums.gradients_of(self._trainable)
            gradients = self._state.lookups.of_batch(gradients)
            in_order = [gradients.get(i) for i in range(len(self._trainable))]
            anywhere = self._strategy.any_of_parts
            self._scaling.apply(tf.nest.flatten(in_order), commit, anywhere)
        with tf.control_dependencies([self._state.commit_metrics(sums.metrics)]):
            return tf.identity(self._scaling.optimizer.iterations)

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the metrics over all steps since they were reset, and the loss scale."""
        return self._model.get_metrics_result() | self._scaling.logs()
