"""The learning-rate range test: a short training whose rate rises from step to step.

Source: Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3: rates from
where the loss begins to fall to where it becomes ragged are worth training with. The rate rises by
the same factor each step, the loss is an exponential average without its bias, and the test ends
where that is four times the lowest, as in fastai's `lr_find`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.run import from_config, recipe
from tfdist.upstream.keras_optimizers import optimizers_of

_SMOOTHING = 0.9
_DIVERGED = 4.0
#: Fewest steps whose slope means anything.
_ENOUGH = 5


class Point(NamedTuple):
    """A step: its rate, the loss of its batch, and the average of the losses so far."""

    rate: float
    loss: float
    smoothed: float


def run(config: TrainConfig, low: float, high: float, num_steps: int) -> list[Point]:
    """Trains what a configuration says, but for its learning rate.

    Args:
        config: Of a training; its rate, schedule and length are left aside.
        low: The first rate.
        high: The last, unless the loss breaks before.
        num_steps: From the first to the last.

    Raises:
        TfdistError: As a training of that configuration.
        ConfigurationError: Several optimizers, each with a rate of its own.
    """
    keras.utils.set_random_seed(config.seed)
    workload = recipe.find(config.recipe)
    strategy = from_config.make_strategy(config)
    data, _ = from_config.make_data(config, workload, strategy)
    trainer = from_config.make_trainer(config, workload, strategy, recipe.num_steps(data))
    factor = (high / low) ** (1 / max(1, num_steps - 1))
    optimizers = optimizers_of(trainer.model)
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"the model has {len(optimizers)} optimizers, and the test raises the rate of one."
        )
    (optimizer,) = optimizers
    getattr(
        optimizer, "inner_optimizer", optimizer
    ).learning_rate = keras.optimizers.schedules.ExponentialDecay(low, 1, factor)
    listening = _Listening(low, factor, num_steps)
    epochs = math.ceil(num_steps / (recipe.num_steps(data) or num_steps))
    trainer.fit(data, epochs=epochs, verbose=0, callbacks=[listening], shuffle=False)
    return listening.points


def advice(points: Sequence[Point]) -> dict[str, str]:
    """Returns what the losses say of the rate, by what it is."""
    rates, losses = np.array([(p.rate, p.smoothed) for p in points]).T
    found = {"steps made": str(len(points))}
    if len(points) < _ENOUGH:
        return found | {"learning rate": "too few steps to tell: take more --steps"}
    lowest = int(np.argmin(losses))
    slopes = np.gradient(losses, np.log(rates))[: lowest + 1]
    if lowest == 0:
        return found | {"learning rate": "the loss never falls: begin lower with --from"}
    return found | {
        "the loss falls fastest at": f"{rates[int(np.argmin(slopes))]:.2g}",
        "it is lowest at": f"{rates[lowest]:.2g}",
        "take for the highest rate": f"--learning-rate {rates[lowest] / 10:.2g}, a tenth of that",
    }


class _Listening(keras.callbacks.Callback):
    """Takes down the loss of each step, and ends the training where it breaks."""

    def __init__(self, low: float, factor: float, num_steps: int) -> None:
        super().__init__()
        self.points: list[Point] = []
        self._low, self._factor, self._num_steps = low, factor, num_steps
        self._total = self._average = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._total, self._in_epoch = 0.0, 0  # Keras's loss is the mean since then

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        number = len(self.points)
        if number >= self._num_steps:
            self.model.stop_training = True
            return
        self._in_epoch += 1
        total = self._in_epoch * float((logs or {})["loss"])
        loss, self._total = total - self._total, total
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        smoothed = self._average / (1 - _SMOOTHING ** (number + 1))
        if not math.isfinite(smoothed):
            self.model.stop_training = True
            return
        self.points.append(Point(self._low * self._factor**number, loss, smoothed))
        lowest = min(point.smoothed for point in self.points)
        if number + 1 == self._num_steps or smoothed > _DIVERGED * max(lowest, 1e-12):
            self.model.stop_training = True
