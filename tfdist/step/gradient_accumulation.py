"""`gradient_accumulation_steps` of a Keras optimizer, with one exchange per optimizer step.

Keras's meaning: the gradients of K batches are averaged, whatever their sizes, and every K-th
batch changes the weights. Each replica keeps its own part of the sum; only the K-th batch sends
it. The Keras optimizer is still called for every batch (it counts, averages, constrains): with
zeros in between, and with the sum of all K batches at the end, to which its own accumulators add
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.precision import Scaling
from tfdist.strategies.base import Strategy


class Accumulators:
    """The sums of gradients that wait on each replica of this process for the K-th batch."""

    def __init__(
        self, strategy: Strategy, scaling: Scaling, trainable: list[keras.Variable]
    ) -> None:
        self._strategy, self._scaling = strategy, scaling
        self._every = scaling.optimizer.gradient_accumulation_steps
        self._sums = [
            [_zeros(variable, device) for variable in trainable] for device in strategy.devices
        ]

    def add(self, local: list[list[Any]], connected: list[int], overflows: tf.Tensor) -> list:
        """Adds a batch's gradients; on the K-th batch, sums them over the replicas.

        Args:
            local: Gradients by replica, scaled; dense or `tf.IndexedSlices`.
            connected: To which of the trainable variables they belong.
            overflows: Number of replicas, over all workers, whose gradients are not finite.

        Returns:
            Gradients by replica for the optimizer: sums over K batches, zeros in between, NaN
            for a batch that is to be left out.
        """
        finite = overflows == 0
        sums = [[own[i] for i in connected] for own in self._sums]
        for gradients, own in zip(local, sums, strict=True):
            for gradient, waiting in zip(gradients, own, strict=True):
                unscaled = self._scaling.unscale([tf.convert_to_tensor(gradient)])[0]
                waiting.assign_add(tf.where(finite, unscaled, 0.0))
        iterations = tf.convert_to_tensor(
            self._scaling.optimizer._iterations
        )  # batches, not updates
        is_last = finite & ((iterations + 1) % self._every == 0)
        nothing = tf.where(finite, 0.0, float("nan"))
        return tf.cond(
            is_last,
            lambda: self._exchange(sums),
            lambda: _map(sums, lambda waiting: tf.fill(waiting.shape, _as(nothing, waiting))),
        )

    def _exchange(self, sums: list[list[tf.Variable]]) -> list[list[tf.Tensor]]:
        def scaled(waiting: tf.Variable) -> tf.Tensor:
            value = waiting.read_value()
            return self._scaling.scale(value) if self._scaling.active else value

        values = _map(sums, scaled)
        results = self._strategy.run(lambda i: self._strategy.all_reduce(values[i]))
        totals = self._strategy.local_results(results)
        with tf.control_dependencies(tf.nest.flatten(values)):
            _map(sums, lambda waiting: waiting.assign(tf.zeros_like(waiting)))
        return totals


def _zeros(variable: keras.Variable, device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)


def _as(value: tf.Tensor, like: tf.Variable) -> tf.Tensor:
    return tf.cast(value, like.dtype)


def _map(by_replica: list[list], fn: Callable[[Any], Any]) -> list[list]:
    return [[fn(value) for value in own] for own in by_replica]
