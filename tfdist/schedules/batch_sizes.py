"""Batch sizes by epoch, and learning rates that follow the batch size."""

from __future__ import annotations

import math

from tfdist.config import TrainConfig


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
