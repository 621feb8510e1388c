"""The learning-rate range test: a short run whose learning rate increases at each step.

Source: Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3: good rates
lie between the one at which the loss begins to fall and the one at which it becomes ragged. As in
fastai's `lr_find`, the rate rises by the same factor in each step, the loss is smoothed by an
exponential average with bias correction, and the test ends where the smoothed loss is four times
its lowest value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist.config import TrainConfig
from tfdist.console import files
from tfdist.errors import ConfigurationError
from tfdist.run import from_config, recipe
from tfdist.upstream.keras_optimizers import optimizers_of, unwrapped

_SMOOTHING = 0.9
_DIVERGED = 4.0
#: Minimum number of steps for a recommendation.
_MIN_STEPS = 5


class Point(NamedTuple):
    """A step: its learning rate, the loss of its batch, and the smoothed loss."""

    rate: float
    loss: float
    smoothed: float


def run(config: TrainConfig, low: float, high: float, num_steps: int) -> list[Point]:
    """Trains with a rising learning rate.

    Raises:
        TfdistError: The run itself fails.
        ConfigurationError: The model has several optimizers.
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
            f"the model has {len(optimizers)} optimizers, but the range test supports only one."
        )
    (optimizer,) = optimizers
    inner = unwrapped(optimizer)
    inner.learning_rate = keras.optimizers.schedules.ExponentialDecay(low, 1, factor)
    losses = _Losses(low, factor, num_steps)
    epochs = math.ceil(num_steps / (recipe.num_steps(data) or num_steps))
    trainer.fit(data, epochs=epochs, verbose=0, callbacks=[losses], shuffle=False)
    return losses.points


def recommendation(points: Sequence[Point]) -> dict[str, str]:
    """Returns the results of the test and a recommended learning rate, as rows to print."""
    rates, losses = np.array([(p.rate, p.smoothed) for p in points]).T
    facts = {"steps": str(len(points))}
    if len(points) < _MIN_STEPS:
        return facts | {"learning rate": "too few steps for a recommendation: increase --steps"}
    lowest = int(np.argmin(losses))
    slopes = np.gradient(losses, np.log(rates))[: lowest + 1]
    if lowest == 0:
        return facts | {
            "learning rate": "the loss never decreases: start at a lower rate with --from"
        }
    return facts | {
        "the loss decreases fastest at": f"{rates[int(np.argmin(slopes))]:.2g}",
        "the loss is lowest at": f"{rates[lowest]:.2g}",
        "recommended (a tenth of that)": f"--learning-rate {rates[lowest] / 10:.2g}",
    }


def draw(points: Sequence[Point], path: Path) -> None:
    """Plots the loss of each batch and the smoothed loss by learning rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    rates = [point.rate for point in points]
    axes.plot(rates, [point.loss for point in points], color="gray", alpha=0.4, label="batch")
    smoothed = [point.smoothed for point in points]
    axes.plot(rates, smoothed, label="smoothed")
    highest = max(smoothed[:1] + smoothed[: len(smoothed) // 2])
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss", ylim=(0, 2 * highest))
    axes.legend()
    axes.grid(alpha=0.3)
    with files.replacing(path) as temporary:
        figure.savefig(temporary, dpi=100)


class _Losses(keras.callbacks.Callback):
    """Records the loss of each step, and stops training when the loss diverges."""

    def __init__(self, low: float, factor: float, num_steps: int) -> None:
        super().__init__()
        self.points: list[Point] = []
        self._low, self._factor, self._num_steps = low, factor, num_steps
        self._total = self._average = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._total, self._in_epoch = 0.0, 0  # Keras reports the epoch's mean

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
