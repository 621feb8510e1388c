"""A learning rate that follows a rule of the epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import ConfigurationError
from tfdist.upstream.keras_optimizers import velocities


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies the initial learning rate between two epochs; its value goes into the logs.

    With momentum, SGD and RMSprop keep a velocity that holds the learning rate of the steps
    before. When the rate changes, the velocity is scaled along (Goyal et al. 2017, "Accurate,
    Large Minibatch SGD", section 3, remark 2).

    Args:
        initial_lr: The rate that is multiplied.
        multiplier: A function of the epoch, or a number: then to the power of the epochs since
            `start_epoch`.
        start_epoch: The first epoch, from 0.
        end_epoch: The epoch before which it ends; None: never.
        staircase: Whether it changes once an epoch; otherwise with each batch, by fractions.
        momentum_correction: Whether the velocity is scaled along.
        steps_per_epoch: Batches of an epoch; None: as `fit` knows.

    Raises:
        ConfigurationError: The optimizer has a schedule of its own, or `steps_per_epoch` is needed.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr, self.steps_per_epoch = initial_lr, steps_per_epoch or 0
        self.start_epoch = start_epoch
        self.end_epoch = float("inf") if end_epoch is None else end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self._multiplier = multiplier

    def multiplier(self, epoch: float) -> float:
        """Returns by what the initial rate is multiplied, from a point in an epoch on."""
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return self._multiplier ** (epoch - self.start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if not isinstance(self._optimizer.learning_rate, keras.Variable):
            raise ConfigurationError(
                f"{type(self).__name__} sets the learning rate, but the optimizer's is a schedule "
                "of its own: create the optimizer with a number, or leave the callback out."
            )
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps") or 0
        if not (self.staircase or self.steps_per_epoch):
            raise ConfigurationError(
                f"{type(self).__name__} changes the rate with each batch, but the number of "
                "batches is unknown: give it steps_per_epoch."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._epoch < self.start_epoch or self._epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(self.initial_lr * self.multiplier(self._epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set(self.initial_lr * self.multiplier(self._epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(self._optimizer.learning_rate)

    def _set(self, rate: float) -> None:
        before = float(self._optimizer.learning_rate)
        self._optimizer.learning_rate = rate
        if self.momentum_correction and before and rate != before:
            for velocity in velocities(self._optimizer):
                velocity.assign(velocity * (rate / before))
