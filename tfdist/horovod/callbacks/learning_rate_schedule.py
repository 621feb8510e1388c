"""A learning rate schedule by epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import ConfigurationError
from tfdist.upstream.keras_optimizers import unwrapped, velocities


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies the initial learning rate by a factor that depends on the epoch.

    The learning rate is added to the logs of each epoch. With momentum, SGD and RMSprop have a
    velocity that contains earlier learning rates. When the rate changes, the velocity is scaled by
    the same factor (momentum correction; Goyal et al. 2017, "Accurate, Large Minibatch SGD",
    section 3, remark 2).

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> halved = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch)
        >>> history = build_model().fit(x, y, epochs=2, verbose=0, callbacks=[halved])
        >>> [f"{rate:.2f}" for rate in history.history["learning_rate"]]
        ['0.10', '0.05']

    Args:
        initial_lr: The learning rate to multiply.
        multiplier: A function that returns the factor for an epoch, or a number, whose power of
            the epochs since `start_epoch` is the factor.
        start_epoch: The first epoch with a changed rate, from 0.
        end_epoch: The epoch before which the schedule ends; None for no end.
        staircase: Whether to change the rate once per epoch. If False, it changes with every
            batch, with fractions of epochs.
        momentum_correction: Whether to scale the velocity.
        steps_per_epoch: Batches per epoch; None for those of `fit`.

    Raises:
        ConfigurationError: The optimizer has a `LearningRateSchedule`, or the number of batches is
            unknown.
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
        """Returns the factor of the initial rate at an epoch, which may be fractional."""
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return self._multiplier ** (epoch - self.start_epoch)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._optimizer = unwrapped(self.model.optimizer)
        if not isinstance(self._optimizer.learning_rate, keras.Variable):
            raise ConfigurationError(
                f"{type(self).__name__} sets the learning rate, but the optimizer has a "
                "LearningRateSchedule. Create the optimizer with a number, or leave out the "
                "callback."
            )
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps") or 0
        if not (self.staircase or self.steps_per_epoch):
            raise ConfigurationError(
                f"{type(self).__name__} changes the rate with each batch, but the number of "
                "batches is unknown. Pass steps_per_epoch to the callback."
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
