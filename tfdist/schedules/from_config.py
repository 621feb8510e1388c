"""Creates and describes the learning rate of a configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.schedules import rules
from tfdist.schedules.batch_sizes import linear_scaling, sqrt_scaling, steps_until
from tfdist.schedules.rules import LearningRate

_SCALINGS = {"linear": linear_scaling, "sqrt": sqrt_scaling}


def peak(config: TrainConfig) -> float:
    """Returns the highest learning rate of a run, after scaling with the batch size.

    Example:
        >>> from tfdist.config import TrainConfig
        >>> config = TrainConfig(
        ...     learning_rate=0.1, batch_size=1024, lr_scaling="linear", lr_reference_batch=256
        ... )
        >>> schedules.peak(config)
        0.4

    Raises:
        ConfigurationError: The rate is scaled, but its reference batch size is unknown.
    """
    if config.lr_scaling == "none":
        return config.learning_rate
    if config.lr_reference_batch is None:
        raise ConfigurationError(
            f"--lr-scaling {config.lr_scaling} needs the batch size that --learning-rate "
            f"{config.learning_rate:g} was chosen for: add --lr-reference-batch, for example 256."
        )
    scale = _SCALINGS[config.lr_scaling]
    return scale(config.learning_rate, config.batch_size, config.lr_reference_batch)


def learning_rate(config: TrainConfig, steps_per_epoch: int | None) -> LearningRate:
    """Returns the learning rate of a configuration for an optimizer, a float or a schedule.

    Example:
        >>> from tfdist.config import TrainConfig
        >>> config = TrainConfig(learning_rate=0.1, lr_rule="cosine", warmup_epochs=1, epochs=10)
        >>> rate = schedules.learning_rate(config, steps_per_epoch=100)
        >>> round(float(rate(100)), 4)  # after the warm-up
        0.1

    Args:
        config: Configuration of the schedule, the rate, its scaling, epochs, and warm-up.
        steps_per_epoch: Steps per epoch with `config.batch_size`; None if unknown.

    Raises:
        ConfigurationError: The warm-up is as long as the run, the schedule depends on the unknown
            length of an epoch, or an option of the schedule is missing.
    """
    highest = peak(config)
    if steps_per_epoch is None:
        if config.lr_rule == "constant" and not config.warmup_epochs:
            return highest
        raise ConfigurationError(
            f"The learning rate ({describe(config)}) depends on the number of steps per epoch, "
            "which is unknown for this dataset: use tf.data.experimental.assert_cardinality in the "
            "recipe's train_data, or --lr-rule constant --warmup-epochs 0."
        )
    until = functools.partial(steps_until, config, steps_per_epoch)
    total_steps, warmup_steps = until(config.epochs), until(config.warmup_epochs)
    if config.lr_rule == "one_cycle":
        return rules.one_cycle(highest, total_steps, warmup_steps, config.warmup_start or None)
    warmup = (warmup_steps, config.warmup_start) if warmup_steps else (0, 0.0)
    if config.lr_rule == "cosine":
        return rules.cosine(highest, total_steps, *warmup)
    if config.lr_rule == "polynomial":
        return rules.polynomial(highest, total_steps, config.lr_power, *warmup)
    if config.lr_rule == "step":
        boundaries = _boundaries(config, until)
        return rules.step(highest, boundaries, config.lr_decay_factor, *warmup)
    return rules.constant(highest, *warmup)


def describe(config: TrainConfig) -> str:
    """Returns a description of the schedule for the start-up table.

    Example:
        >>> from tfdist.config import TrainConfig
        >>> schedules.describe(TrainConfig(learning_rate=0.1, lr_rule="cosine", warmup_epochs=5))
        'cosine, 0.1, linear warmup over 5 epochs'
    """
    words = f"{config.lr_rule}, {peak(config):g}"
    if config.lr_scaling != "none":
        words += (
            f" ({config.learning_rate:g} per {config.lr_reference_batch} examples, "
            f"{config.lr_scaling})"
        )
    if config.lr_rule == "step":
        epochs = ", ".join(f"{epoch:g}" for epoch in _decay_epochs(config))
        words += f", multiplied by {config.lr_decay_factor:g} after epochs {epochs}"
    if config.lr_rule == "polynomial":
        words += f", power {config.lr_power:g}"
    if config.warmup_epochs:
        words += f", linear warmup over {config.warmup_epochs:g} epochs"
        words += f" from {config.warmup_start:g}" if config.warmup_start else ""
    return words


def _boundaries(config: TrainConfig, steps_until: Callable[[float], int]) -> list[int]:
    """Returns the steps at which the rate decays, one for each of the configuration's epochs.

    With few steps per epoch, two fractional epochs, or one and the end of the warm-up, may round to
    the same step. The later one is then moved to the next step.
    """
    steps: list[int] = []
    before, latest = config.warmup_epochs, steps_until(config.warmup_epochs)
    for epoch in _decay_epochs(config):
        latest = max(steps_until(epoch), latest + 1 if epoch > before else 0)
        steps.append(latest)
        before = epoch
    return steps


def _decay_epochs(config: TrainConfig) -> list[float]:
    if not config.lr_decay_epochs:
        raise ConfigurationError(
            "--lr-rule step needs the epochs after which the rate decays: add "
            "--lr-decay-epochs, for example 30,60,80."
        )
    return config.lr_decay_epochs
