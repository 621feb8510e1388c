"""The step that trains: what gradients add to a step, and what an optimizer makes of their sums.

Each copy of the variables is changed alike: unscale -> finite? -> clip -> apply, the last two by
the Keras optimizer itself, just as on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.step.evaluate import EvalStep, Sums
from tfdist.step.gradient_accumulation import Accumulators
from tfdist.step.keras_patches import as_on_one_device
from tfdist.step.replica import Totals
from tfdist.strategies.shares import Batch


class TrainStep(EvalStep):
    """One optimizer step on a global batch."""

    training = True

    def __init__(self, model: keras.Model, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self.trainable = model.trainable_variables
        self.connected: list[int] = []  # trainable variables that have a gradient
        self.accumulators = None
        if self.scaling.optimizer.gradient_accumulation_steps:
            self.accumulators = Accumulators(self.strategy, self.scaling, self.trainable)

    def gradients(
        self, tape: tf.GradientTape, loss: tf.Tensor, scope: keras.StatelessScope
    ) -> list:
        """Returns the gradients of the variables that the loss depends on."""
        assigned = [scope.get_current_value(v) for v in self.trainable]
        sources = zip(self.trainable, assigned, strict=True)
        gradients = tape.gradient(loss, [v.value if new is None else new for v, new in sources])
        self.connected = [i for i, gradient in enumerate(gradients) if gradient is not None]
        return [gradients[i] for i in self.connected]

    def sums(self, total_rows: tf.Tensor, shares: Sequence[Batch]) -> Any:
        if self.accumulators is None:
            return super().sums(total_rows, shares)
        part, run = functools.partial(self.part, total_rows), self.strategy.run
        local = self.strategy.local_results(run(lambda i: part(i, 0, shares[i], Totals())))
        gradients = [own.pop("gradients") for own in local]

        def but_gradients(i: int) -> Sums:
            return self.exchange(local[i] | {"overflows": [self.scaling.overflows(gradients[i])]})

        rest = self.strategy.local_results(run(but_gradients))
        waited = self.accumulators.add(gradients, self.connected, rest[0]["overflows"][0])
        return run(lambda i: rest[i] | {"gradients": waited[i]})

    def apply(self, sums: Sums) -> tf.Tensor:
        gradients: list[Any] = [None] * len(self.trainable)
        for i, gradient in zip(self.connected, sums["gradients"], strict=True):
            gradients[i] = gradient

        def commit(unscaled: list) -> None:
            # First the state: a layer may have assigned to a weight (SpectralNormalization),
            # of which the gradients are those of the new value.
            self.state.commit(sums)
            if self.trainable:
                with as_on_one_device():
                    self.scaling.optimizer.apply(unscaled, self.trainable)

        # A weight that is written while the backward pass still reads it is copied first.
        with tf.control_dependencies(sums["gradients"]):
            self.scaling.apply(gradients, commit)
        with tf.control_dependencies([self.state.commit_metrics(sums)]):
            return tf.identity(self.scaling.optimizer.iterations)

    def logs(self) -> dict[str, tf.Tensor]:
        return super().logs() | self.scaling.logs()
