"""Scales the learning rate with the global batch size."""

from __future__ import annotations

import math


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
