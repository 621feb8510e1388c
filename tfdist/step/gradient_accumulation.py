"""`gradient_accumulation_steps` of a Keras optimizer, with one exchange per optimizer step.

Keras's meaning: the gradients of K batches are averaged, whatever their sizes, and every K-th
batch changes the weights. Each replica keeps its own part of the sum; only the K-th batch sends
it. The Keras optimizer is still called for every batch (it counts, averages, constrains): with
zeros in between, and with the sum of all K batches at the end, to which its own accumulators add
nothing.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.precision import Scaling
from tfdist.step.forward_backward import Contribution
from tfdist.step.summed import all_reduced
from tfdist.strategies.base import Strategy
from tfdist.upstream.keras_optimizers import num_batches_seen

Gradients = dict[int, Any]  # by place among the trainable variables


class GradientAccumulation:
    """The sums of gradients that wait on each replica of this process for the K-th batch.

    Args:
        strategy: Of the replicas.
        scaling: Of the loss; its optimizer accumulates.
        trainable: The variables that it trains.

    Attributes:
        waiting: The sums, by replica of this process and by variable.
    """

    def __init__(
        self, strategy: Strategy, scaling: Scaling, trainable: list[keras.Variable]
    ) -> None:
        self._strategy, self._scaling, self._trainable = strategy, scaling, trainable
        self._every = scaling.optimizer.gradient_accumulation_steps
        self.waiting = [
            [_zeros(variable, strategy.place_of(variable, index)) for variable in trainable]
            for index in range(strategy.num_local_replicas)
        ]

    def has_waiting(self) -> bool:
        """Tells whether gradients wait now; called outside of any graph."""
        return int(num_batches_seen(self._scaling.optimizer)) % self._every > 0

    def summed(self, local: list[Contribution]) -> Any:
        """Adds up the contributions of all replicas, but keeps gradients until the K-th batch.

        Args:
            local: Of each replica of this process.

        Returns:
            The sums on each replica, as `Strategy.run` returns them. The gradients are those of K
            batches, zeros in between, and NaN for a batch that is to be left out.
        """
        strategy = self._strategy

        def but_gradients(i: int) -> tuple[Contribution, tf.Tensor]:
            rest = local[i]._replace(gradients={}, indices={})
            overflows = self._scaling.overflows(list(local[i].gradients.values()))
            sums, overflows = all_reduced(strategy, (rest.summable(), overflows))
            return sums.with_same(rest), overflows

        rest = strategy.local_results(strategy.run(but_gradients))
        own = [share.gradients_of(self._trainable) for share in local]
        gradients = self._add(own, rest[0][1])
        return strategy.run(lambda i: rest[i][0]._replace(gradients=gradients[i]))

    def _add(self, local: list[Gradients], overflows: tf.Tensor) -> list[Gradients]:
        """Adds a batch's gradients; on the K-th batch, sums them over the replicas.

        Args:
            local: Gradients by replica, scaled; dense or `tf.IndexedSlices`.
            overflows: Number of replicas, over all workers, whose gradients are not finite.
        """
        finite = overflows == 0
        waiting = [
            {i: own[i] for i in gradients}
            for own, gradients in zip(self.waiting, local, strict=True)
        ]
        for gradients, own in zip(local, waiting, strict=True):
            for i, gradient in gradients.items():
                unscaled = self._scaling.unscale([tf.convert_to_tensor(gradient)])[0]
                own[i].assign_add(tf.where(finite, unscaled, 0.0))
        num_batches = num_batches_seen(self._scaling.optimizer)
        is_last = finite & ((num_batches + 1) % self._every == 0)
        nothing = tf.where(finite, 0.0, float("nan"))

        def none_yet(variable: tf.Variable) -> tf.Tensor:
            return tf.fill(variable.shape, tf.cast(nothing, variable.dtype))

        return tf.cond(
            is_last,
            lambda: self._exchanged(waiting),
            lambda: tf.nest.map_structure(none_yet, waiting),
        )

    def _exchanged(self, waiting: list[dict[int, tf.Variable]]) -> list[Gradients]:
        """Sums over the replicas what has been waiting, and starts again from zero."""
        strategy = self._strategy

        def scaled(variable: tf.Variable) -> tf.Tensor:
            value = variable.read_value()
            return self._scaling.scale(value) if self._scaling.active else value

        values = tf.nest.map_structure(scaled, waiting)
        results = strategy.run(lambda i: all_reduced(strategy, values[i]))
        totals = strategy.local_results(results)
        with tf.control_dependencies(tf.nest.flatten(values)):
            tf.nest.map_structure(lambda v: v.assign(tf.zeros_like(v)), waiting)
        return totals


def _zeros(variable: keras.Variable, device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
