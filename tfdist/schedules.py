"""Learning-rate rules: functions that return a float or a Keras schedule.

All are built from what Keras ships, so that a saved model loads without tfdist. Steps are optimizer
steps, which are global batches.
"""

from __future__ import annotations

from typing import TypeAlias

import keras

from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError

LearningRate: TypeAlias = float | keras.optimizers.schedules.LearningRateSchedule


def constant(learning_rate: float, warmup_steps: int = 0) -> LearningRate:
    """The same rate for every step, after a linear rise from zero over `warmup_steps`.

    Source of the warmup: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2.
    """
    if not warmup_steps:
        return learning_rate
    # A cosine that ends where it begins (alpha=1) is Keras's way to warm up to a constant.
    return keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps=1, alpha=1.0, warmup_target=learning_rate, warmup_steps=warmup_steps
    )


def cosine(learning_rate: float, total_steps: int, warmup_steps: int = 0) -> LearningRate:
    """Half a cosine from `learning_rate` to zero, after a linear rise over `warmup_steps`.

    Source: Loshchilov and Hutter 2017, "SGDR", equation 5, with one period.

    Args:
        learning_rate: The highest value.
        total_steps: Steps of the whole training, the warmup's among them.
        warmup_steps: Steps of the rise.

    Raises:
        ConfigurationError: The warmup leaves no step for the decay.
    """
    if warmup_steps >= total_steps:
        raise ConfigurationError(
            f"The warmup takes {warmup_steps} of {total_steps} steps and leaves none for the "
            "cosine: lower --warmup-epochs or raise --epochs."
        )
    decay_steps = total_steps - warmup_steps  # Keras counts the decay alone
    if not warmup_steps:
        return keras.optimizers.schedules.CosineDecay(learning_rate, decay_steps)
    return keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps, warmup_target=learning_rate, warmup_steps=warmup_steps
    )


def linear_scaling(learning_rate: float, batch_size: int, reference_batch: int) -> float:
    """The rate for a global batch of `batch_size`, given the one for `reference_batch`.

    Source: Goyal et al. 2017, section 2.1: "when the minibatch size is multiplied by k, multiply
    the learning rate by k". It was found for SGD with momentum, and together with a warmup.
    """
    return learning_rate * batch_size / reference_batch


def peak(config: TrainConfig) -> float:
    """The highest learning rate of a run, scaled to its batch where the configuration says so."""
    if config.lr_reference_batch is None:
        return config.learning_rate
    return linear_scaling(config.learning_rate, config.batch_size, config.lr_reference_batch)


def learning_rate(config: TrainConfig, steps_per_epoch: int | None) -> LearningRate:
    """The learning rate that the configuration asks for, ready for an optimizer.

    Args:
        config: Gives the rule, the rate, the epochs and the warmup.
        steps_per_epoch: Global batches in one epoch; None where the data do not tell.

    Raises:
        ConfigurationError: The warmup is as long as the training, or the rule goes by the length
            of an epoch and nobody knows it.
    """
    if steps_per_epoch is None:
        if config.lr_rule == "constant" and not config.warmup_epochs:
            return peak(config)
        raise ConfigurationError(
            f"The learning rate ({describe(config)}) goes by the steps of an epoch, and the data "
            "do not tell how many they are: use tf.data.experimental.assert_cardinality in the "
            "recipe's train_data, or --lr-rule constant --warmup-epochs 0."
        )
    warmup_steps = round(config.warmup_epochs * steps_per_epoch)
    if config.lr_rule == "cosine":
        return cosine(peak(config), config.epochs * steps_per_epoch, warmup_steps)
    return constant(peak(config), warmup_steps)


def describe(config: TrainConfig) -> str:
    """The rule in words, for the start-up table."""
    words = f"{config.lr_rule}, {peak(config):g}"
    if config.lr_reference_batch is not None:
        words += f" ({config.learning_rate:g} per {config.lr_reference_batch} examples)"
    if config.warmup_epochs:
        words += f", linear warmup over {config.warmup_epochs:g} epochs"
    return words
