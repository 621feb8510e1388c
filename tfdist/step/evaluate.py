"""What one replica does in one step, and how the sums of all replicas change the model.

Whatever a share contributes is a sum over its rows: gradients of its part of the loss, the change
in the metrics' states, its part of the new moving statistics. They cross the replicas together,
in one fused all-reduce. Then each copy of the variables is changed alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.precision import Scaling
from tfdist.step import compiled_loss, total_loss
from tfdist.step.forward_state import ForwardState
from tfdist.step.keras_patches import keras_on_shares
from tfdist.step.microbatches import over_rounds
from tfdist.step.replica import Replica, Totals
from tfdist.strategies.base import Strategy
from tfdist.strategies.shares import Batch, num_rows

#: What a share contributes: "gradients", "metrics" and "states" are to be summed over all shares;
#: "same" (seeds, counters) and "whole_metrics" are alike on each.
Sums = dict[str, list]
ALIKE = ("same", "whole_metrics")


class EvalStep:
    """Loss and metrics of a global batch, without training; see `strategies.loop.Step`."""

    training = False

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        state: ForwardState,
        scaling: Scaling,
        accumulate: int = 1,
        sync_batch_norm: bool = False,
    ) -> None:
        self.model, self.strategy, self.state, self.scaling = model, strategy, state, scaling
        self.accumulate, self.sync_batch_norm = accumulate, sync_batch_norm
        self._compiled: dict[int, Callable[..., Sums]] = {}

    def __call__(self, total_rows: tf.Tensor, parts: Sequence[Batch]) -> Any:
        with keras_on_shares(self.model, self.sync_batch_norm):
            sums = self.sums(total_rows, parts)
        return self.strategy.update(self.apply, sums)

    def sums(self, total_rows: tf.Tensor, shares: Sequence[Batch]) -> Any:
        """Returns the sums over all replicas, on each of them."""
        run, part = self.strategy.run, functools.partial(self.part, total_rows)
        if self.accumulate == 1:
            return run(lambda i: self.exchange(part(i, 0, shares[i], Totals())))
        local = over_rounds(self.strategy, part, shares, self.accumulate)
        return run(lambda i: self.exchange(local[i]))

    def part(
        self, total_rows: tf.Tensor, index: int, number: Any, share: Batch, totals: Totals
    ) -> Sums:
        """Returns what a share contributes; compiled by XLA where the model asks for it."""
        if not (self.model.jit_compile and self.strategy.has_local_variables):
            return self.contribution(index, total_rows, number, share, totals)
        if index not in self._compiled:  # one a replica: each captures its own variables
            fn = functools.partial(self.contribution, index, in_xla=True)
            self._compiled[index] = tf.function(fn, jit_compile=True, autograph=False)
        return self._compiled[index](total_rows, number, share, totals)

    def contribution(
        self,
        index: int,
        total_rows: tf.Tensor,
        number: Any,
        share: Batch,
        totals: Totals,
        in_xla: bool = False,
    ) -> Sums:
        """Forward and backward pass of one share; no variable changes."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(share)
        replica = Replica(
            index=self.strategy.first_replica + index,
            num_replicas=self.strategy.num_replicas,
            num_rounds=self.accumulate,
            round=number,
            num_rows=num_rows(x),
            total_rows=total_rows,
            all_reduce=self.strategy.all_reduce,
            totals=totals,
            in_xla=in_xla,
        )
        with self.state.scope(replica) as scope, replica:
            with tf.GradientTape(watch_accessed_variables=self.training) as tape:
                y_pred = call(self.model, x, self.training)
                loss = total_loss.contribution(
                    self.model,
                    replica,
                    (x, y, sample_weight),
                    y_pred,
                    scope.losses,
                    self.state.kinds,
                    self.training,
                )
                scaled = self.scaling.scale(loss) if self.training else loss
            gradients = self.gradients(tape, scaled, scope)
            total_loss.track(self.model._loss_tracker, loss, replica)
            if self.state.sees_whole_batches(replica):
                share_pred = y_pred
                x, y, y_pred, sample_weight = replica.gather((x, y, y_pred, sample_weight))
                compiled_loss.gather_masks(replica, share_pred, y_pred)
            self.model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return {"gradients": gradients} | self.state.changes(scope, replica)

    def gradients(
        self, tape: tf.GradientTape, loss: tf.Tensor, scope: keras.StatelessScope
    ) -> list:
        """Returns no gradients: nothing is trained."""
        del tape, loss, scope
        return []

    def exchange(self, sums: Sums) -> Sums:
        """Adds up the contributions of all replicas; called on a replica."""
        crossing = {name: tensors for name, tensors in sums.items() if name not in ALIKE}
        wire = self.strategy.wire_dtype
        if wire is not None:
            crossing["gradients"] = [tf.cast(g, wire) for g in sums["gradients"]]
        reduced = iter(self.strategy.all_reduce([t for own in crossing.values() for t in own]))
        return sums | {
            name: [tf.cast(next(reduced), own.dtype) for own in sums[name]] for name in crossing
        }

    def apply(self, sums: Sums) -> tf.Tensor:
        """Changes one copy of the variables by the sums."""
        self.state.commit(sums)
        return self.state.commit_metrics(sums)

    def logs(self) -> dict[str, tf.Tensor]:
        """Returns the metrics over all steps since they were reset."""
        return self.model.get_metrics_result()


def call(model: keras.Model, x: Any, training: bool) -> Any:
    """Calls a model as Keras's own steps do."""
    return model(x, training=training) if model._call_has_training_arg else model(x)
