"""Learning-rate rules: functions that return a float or a Keras schedule.

They are built from what Keras ships, so that a saved model loads without tfdist; only the rise in
front of `step` and `polynomial`, which Keras has not, is a class of our own (`Warmup`). Steps are
optimizer steps, which are global batches; the first one is step 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import keras

from tfdist.errors import ConfigurationError
from tfdist.schedules.warmup import Warmup

LearningRate: TypeAlias = float | keras.optimizers.schedules.LearningRateSchedule


def constant(learning_rate: float, warmup_steps: int = 0, start: float = 0.0) -> LearningRate:
    """The same rate for every step, after a linear rise from `start` over `warmup_steps`.

    Source of the rise: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2.
    """
    if not warmup_steps:
        return learning_rate
    # A cosine that ends where it begins (alpha=1) is Keras's way to warm up to a constant.
    return keras.optimizers.schedules.CosineDecay(
        start, decay_steps=1, alpha=1.0, warmup_target=learning_rate, warmup_steps=warmup_steps
    )


def cosine(
    learning_rate: float, total_steps: int, warmup_steps: int = 0, start: float = 0.0
) -> LearningRate:
    """Half a cosine from `learning_rate` to zero, after a linear rise over `warmup_steps`.

    Source: Loshchilov and Hutter 2017, "SGDR", equation 5, with one period.

    Args:
        learning_rate: The highest value.
        total_steps: Steps of the whole training, the warm-up's among them.
        warmup_steps: Steps of the rise.
        start: Where the rise begins.

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
    """`learning_rate * (1 - i/n) ** power` to zero over the n steps after the warm-up.

    Source: You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks",
    section 5, whose power for LARS is 2; 1 is a straight line.

    Args:
        learning_rate: The highest value.
        total_steps: Steps of the whole training, the warm-up's among them.
        power: Of the polynomial.
        warmup_steps: Steps of the rise.
        start: Where the rise begins.

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
    """`learning_rate`, times `factor` from each of the boundaries on.

    Source: Goyal et al. 2017, section 5.1: a tenth at the 30th, 60th and 80th epoch.

    Args:
        learning_rate: The highest value.
        boundaries: The steps from which the next rate holds, rising.
        factor: From one rate to the next.
        warmup_steps: Steps of the rise, which the boundaries count too.
        start: Where the rise begins.

    Raises:
        ConfigurationError: The boundaries do not rise, or lie in the warm-up.
    """
    if list(boundaries) != sorted(set(boundaries)) or min(boundaries, default=1) <= warmup_steps:
        raise ConfigurationError(
            f"The rate falls at the steps {', '.join(map(str, boundaries))}: expected rising ones "
            f"after the {warmup_steps} of the warmup: change --lr-decay-epochs or --warmup-epochs."
        )
    rates = [learning_rate * factor**i for i in range(len(boundaries) + 1)]
    # Keras's boundaries are the last steps of the rate before.
    last = [boundary - warmup_steps - 1 for boundary in boundaries]
    decay = keras.optimizers.schedules.PiecewiseConstantDecay(last, rates)
    return Warmup(decay, warmup_steps, start) if warmup_steps else decay


def one_cycle(
    learning_rate: float, total_steps: int, warmup_steps: int = 0, start: float | None = None
) -> LearningRate:
    """A rise over three tenths of the training, then half a cosine to nearly zero.

    Source: Smith and Topin 2017, "Super-Convergence", in the form that became usual: from a 25th
    of the highest rate, linearly, and down to a ten-thousandth of that. The momentum stays.

    Args:
        learning_rate: The highest value.
        total_steps: Steps of the whole training.
        warmup_steps: Steps of the rise; 0: three tenths of all.
        start: Where the rise begins; None: at a 25th of `learning_rate`.

    Raises:
        ConfigurationError: The rise leaves no step for the decay.
    """
    rise = warmup_steps or max(1, round(0.3 * total_steps))
    return keras.optimizers.schedules.CosineDecay(
        learning_rate / 25 if start is None else start,
        _steps_of_decay(total_steps, rise, "one-cycle"),
        alpha=1 / 25e4,
        warmup_target=learning_rate,
        warmup_steps=rise,
    )


def _steps_of_decay(total_steps: int, warmup_steps: int, rule: str) -> int:
    """The steps after the warm-up.

    Raises:
        ConfigurationError: There are none.
    """
    if warmup_steps >= total_steps:
        raise ConfigurationError(
            f"The warmup takes {warmup_steps} of {total_steps} steps and leaves none for the "
            f"{rule}: lower --warmup-epochs or raise --epochs."
        )
    return total_steps - warmup_steps
