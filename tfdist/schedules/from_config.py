"""Creates and describes the learning rate of a configuration."""

from __future__ import annotations

import functools
import math

from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.schedules import rules
from tfdist.schedules.rules import LearningRate


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
        # With few steps per epoch, two fractional epochs, or one and the end of the warm-up, may
        # round to the same step. The later one is then moved to the next step.
        boundaries: list[int] = []
        before, latest = config.warmup_epochs, until(config.warmup_epochs)
        for epoch in _decay_epochs(config):
            latest = max(until(epoch), latest + 1 if epoch > before else 0)
            boundaries.append(latest)
            before = epoch
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


def _decay_epochs(config: TrainConfig) -> list[float]:
    if not config.lr_decay_epochs:
        raise ConfigurationError(
            "--lr-rule step needs the epochs after which the rate decays: add "
            "--lr-decay-epochs, for example 30,60,80."
        )
    return config.lr_decay_epochs


# ---- batch sizes ----


def batch_sizes(config: TrainConfig) -> int | dict[int, int]:
    """Returns the global batch size, or sizes by first epoch (from 0), for `Trainer.fit`.

    Example:
        >>> from tfdist.config import TrainConfig
        >>> schedules.batch_sizes(TrainConfig(batch_size=256, batch_warmup=["64:2", "128:2"]))
        {0: 64, 2: 128, 4: 256}
    """
    sizes, epoch = {}, 0
    for stage in config.batch_warmup or ():
        size, _, epochs = stage.partition(":")
        sizes[epoch] = int(size)
        epoch += int(epochs)
    return {**sizes, epoch: config.batch_size} if sizes else config.batch_size


def steps_until(config: TrainConfig, steps_per_epoch: int, epoch: float) -> int:
    """Returns the number of optimizer steps up to a point in training.

    Args:
        config: Configuration of the batch sizes.
        steps_per_epoch: Steps per epoch with `config.batch_size`. The number of steps with smaller
            batches is computed as if the last batch of the epoch were full.
        epoch: The point, in epochs since the start; may be fractional.
    """
    sizes = batch_sizes(config)
    if isinstance(sizes, int):
        return round(epoch * steps_per_epoch)
    rows, steps, ends = steps_per_epoch * config.batch_size, 0.0, [*sizes, float("inf")][1:]
    for (begin, size), end in zip(sizes.items(), ends, strict=True):
        steps += max(0.0, min(epoch, end) - begin) * -(-rows // size)
    return round(steps)


def linear_scaling(learning_rate: float, batch_size: int, reference_batch: int) -> float:
    """Returns the learning rate for `batch_size`, by the linear scaling rule.

    Example:
        >>> schedules.linear_scaling(0.1, batch_size=1024, reference_batch=256)
        0.4

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1: "When the minibatch
    size is multiplied by k, multiply the learning rate by k". Use it with SGD with momentum and
    with a warm-up.

    Args:
        learning_rate: The rate that works for `reference_batch`.
        batch_size: Size of the global batch.
        reference_batch: The global batch for which `learning_rate` was chosen.
    """
    return learning_rate * batch_size / reference_batch


def sqrt_scaling(learning_rate: float, batch_size: int, reference_batch: int) -> float:
    """Returns the learning rate for `batch_size`, by the square-root scaling rule.

    It keeps the variance of a step. Source: Krizhevsky 2014, "One weird trick for parallelizing
    convolutional neural networks", section 5. It is usual with Adam and LAMB (You et al. 2020,
    "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", section 4.1).

    Example:
        >>> schedules.sqrt_scaling(0.001, batch_size=1024, reference_batch=256)
        0.002

    Args:
        learning_rate: The rate that works for `reference_batch`.
        batch_size: Size of the global batch.
        reference_batch: The global batch for which `learning_rate` was chosen.
    """
    return learning_rate * math.sqrt(batch_size / reference_batch)


_SCALINGS = {"linear": linear_scaling, "sqrt": sqrt_scaling}
