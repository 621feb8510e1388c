"""Learning rate schedules: functions that return a float or a Keras schedule.

They use Keras's schedules, so that a saved model loads without tfdist, except for the warm-up of
`step` and `polynomial` (`Warmup`), which Keras lacks. Steps are optimizer steps, each on one global
batch, counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError

LearningRate: TypeAlias = float | keras.optimizers.schedules.LearningRateSchedule
Schedule: TypeAlias = keras.optimizers.schedules.LearningRateSchedule


def constant(learning_rate: float, warmup_steps: int = 0, start: float = 0.0) -> LearningRate:
    """Returns a constant learning rate, after an optional linear warm-up from `start`.

    Source of the warm-up: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2.

    Example:
        >>> schedules.constant(0.1)
        0.1
        >>> rate = schedules.constant(0.1, warmup_steps=10)
        >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 100)]
        [0.0, 0.05, 0.1, 0.1]

    Args:
        learning_rate: The rate after the warm-up.
        warmup_steps: Length of the warm-up, in optimizer steps.
        start: The rate at step 0.
    """
    if not warmup_steps:
        return learning_rate
    # Keras has no constant schedule with a warm-up; a cosine decay with alpha=1 is constant.
    return keras.optimizers.schedules.CosineDecay(
        start, decay_steps=1, alpha=1.0, warmup_target=learning_rate, warmup_steps=warmup_steps
    )


def cosine(
    learning_rate: float, total_steps: int, warmup_steps: int = 0, start: float = 0.0
) -> LearningRate:
    """Returns a cosine decay from `learning_rate` to 0, after an optional linear warm-up.

    Example:
        >>> rate = schedules.cosine(0.1, total_steps=100, warmup_steps=10)
        >>> [round(float(rate(step)), 3) for step in (0, 10, 55, 100)]
        [0.0, 0.1, 0.05, 0.0]

    Source: Loshchilov and Hutter 2017, "SGDR", equation 5, with one period.

    Args:
        learning_rate: The highest rate.
        total_steps: Optimizer steps of the run, including the warm-up.
        warmup_steps: Length of the warm-up, in optimizer steps.
        start: The rate at the beginning of the warm-up.

    Raises:
        ConfigurationError: The warm-up leaves no step for the decay.
    """
    decay_steps = _steps_of_decay(total_steps, warmup_steps, "cosine")
    if not warmup_steps:
        return keras.optimizers.schedules.CosineDecay(learning_rate, decay_steps)
    return keras.optimizers.schedules.CosineDecay(
        start, decay_steps, warmup_target=learning_rate, warmup_steps=warmup_steps
    )


def polynomial(
    learning_rate: float,
    total_steps: int,
    power: float = 2.0,
    warmup_steps: int = 0,
    start: float = 0.0,
) -> LearningRate:
    """Returns a polynomial decay, `learning_rate * (1 - i/n) ** power`, after an optional warm-up.

    `n` is the number of steps after the warm-up. Source: You, Gitman and Ginsburg 2017, "Large
    Batch Training of Convolutional Networks", section 5, which uses a power of 2 for LARS. A power
    of 1 gives a linear decay.

    Example:
        >>> rate = schedules.polynomial(0.1, total_steps=100, power=2.0)
        >>> [round(float(rate(step)), 4) for step in (0, 50, 100)]
        [0.1, 0.025, 0.0]

    Args:
        learning_rate: The highest rate.
        total_steps: Optimizer steps of the run, including the warm-up.
        power: Exponent of the polynomial.
        warmup_steps: Length of the warm-up, in optimizer steps.
        start: The rate at the beginning of the warm-up.

    Raises:
        ConfigurationError: The warm-up leaves no step for the decay.
    """
    decay_steps = _steps_of_decay(total_steps, warmup_steps, "polynomial")
    decay = keras.optimizers.schedules.PolynomialDecay(
        learning_rate, decay_steps, end_learning_rate=0.0, power=power
    )
    return Warmup(decay, warmup_steps, start) if warmup_steps else decay


def step(
    learning_rate: float,
    boundaries: Sequence[int],
    factor: float = 0.1,
    warmup_steps: int = 0,
    start: float = 0.0,
) -> LearningRate:
    """Returns a step decay: the rate is multiplied by `factor` at each boundary.

    Example:
        >>> rate = schedules.step(0.1, boundaries=[300, 600])
        >>> [round(float(rate(step)), 4) for step in (0, 299, 300, 600)]
        [0.1, 0.1, 0.01, 0.001]

    Source: Goyal et al. 2017, section 5.1, which divides by 10 at the epochs 30, 60 and 80.

    Args:
        learning_rate: The rate before the first boundary.
        boundaries: The optimizer steps at which each next rate starts to apply, in ascending order.
        factor: Ratio of each rate to the previous one.
        warmup_steps: Length of the warm-up. Boundaries count from step 0, not from its end.
        start: The rate at the beginning of the warm-up.

    Raises:
        ConfigurationError: The boundaries do not increase, or one is within the warm-up.
    """
    if list(boundaries) != sorted(set(boundaries)) or min(boundaries, default=1) <= warmup_steps:
        raise ConfigurationError(
            f"The learning rate decays at steps {', '.join(map(str, boundaries))}: expected "
            f"increasing steps after the warm-up of {warmup_steps} steps. Change --lr-decay-epochs "
            "or --warmup-epochs."
        )
    rates = [learning_rate * factor**i for i in range(len(boundaries) + 1)]
    # Keras's boundaries are the last steps of the previous rate.
    last = [boundary - warmup_steps - 1 for boundary in boundaries]
    decay = keras.optimizers.schedules.PiecewiseConstantDecay(last, rates)
    return Warmup(decay, warmup_steps, start) if warmup_steps else decay


def one_cycle(
    learning_rate: float, total_steps: int, warmup_steps: int = 0, start: float | None = None
) -> LearningRate:
    """Returns the one-cycle schedule: a linear rise, then a cosine decay to almost 0.

    Example:
        >>> rate = schedules.one_cycle(0.1, total_steps=100)
        >>> [round(float(rate(step)), 3) for step in (0, 30, 65, 100)]
        [0.004, 0.1, 0.05, 0.0]

    Source: Smith and Topin 2017, "Super-Convergence", in its usual form. The rate rises linearly
    over 30% of the steps from 1/25 of the highest rate, and then decays to 1/10,000 of that. The
    momentum is constant.

    Args:
        learning_rate: The highest rate.
        total_steps: Optimizer steps of the run.
        warmup_steps: Length of the rise, in optimizer steps; 0: 30% of the steps.
        start: The rate at step 0; None: 1/25 of `learning_rate`.

    Raises:
        ConfigurationError: The warm-up leaves no step for the decay.
    """
    warmup_steps = warmup_steps or max(1, round(0.3 * total_steps))
    return keras.optimizers.schedules.CosineDecay(
        learning_rate / 25 if start is None else start,
        _steps_of_decay(total_steps, warmup_steps, "one-cycle"),
        alpha=1 / 25e4,
        warmup_target=learning_rate,
        warmup_steps=warmup_steps,
    )


def _steps_of_decay(total_steps: int, warmup_steps: int, rule: str) -> int:
    """Returns the number of steps after the warm-up."""
    if warmup_steps >= total_steps:
        raise ConfigurationError(
            f"The warm-up takes {warmup_steps} of {total_steps} steps and leaves none for the "
            f"{rule} decay. Decrease --warmup-epochs or increase --epochs."
        )
    return total_steps - warmup_steps


@keras.saving.register_keras_serializable(package="tfdist.schedules")
class Warmup(Schedule):
    """A linear warm-up from `start` to the first rate of another schedule, which follows it.

    At step i of W, the rate is `start + (then(0) - start) * i / W`; from step W on it is
    `then(i - W)`. The rate thus rises in equal increments and reaches its peak after W steps.

    Example:
        >>> decay = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.5)
        >>> rate = schedules.Warmup(decay, warmup_steps=10)
        >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 110)]
        [0.0, 0.05, 0.1, 0.05]

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2, where `start` is the
    rate for the reference batch.

    Args:
        then: The schedule after the warm-up.
        warmup_steps: Length of the warm-up in optimizer steps, at least 1.
        start: The rate at step 0.
    """

    def __init__(self, then: Schedule, warmup_steps: int, start: float = 0.0) -> None:
        super().__init__()
        self.then, self.warmup_steps, self.start = then, warmup_steps, start

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the learning rate at an optimizer step (from 0), a float32 scalar."""
        done = tf.cast(tf.convert_to_tensor(step), tf.float32)
        steps = tf.constant(self.warmup_steps, tf.float32)
        peak = tf.cast(self.then(tf.constant(0.0)), tf.float32)
        rising = self.start + (peak - self.start) * tf.minimum(done / steps, 1.0)
        after = tf.cast(self.then(tf.maximum(done - steps, 0.0)), tf.float32)
        return tf.where(done < steps, rising, after)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of this schedule, as Keras saves them."""
        return {
            "then": keras.optimizers.schedules.serialize(self.then),
            "warmup_steps": self.warmup_steps,
            "start": self.start,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Warmup:
        """Creates a schedule from the arguments that `get_config` returned."""
        then = keras.optimizers.schedules.deserialize(config["then"])
        return cls(**{**config, "then": then})
