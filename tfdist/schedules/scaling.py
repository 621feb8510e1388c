"""How the learning rate goes with the global batch."""

from __future__ import annotations

import math


def linear_scaling(learning_rate: float, batch_size: int, reference_batch: int) -> float:
    """The rate for a global batch of `batch_size`, given the one for `reference_batch`.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1: "When the minibatch
    size is multiplied by k, multiply the learning rate by k". It was found for SGD with momentum,
    and together with a warm-up.
    """
    return learning_rate * batch_size / reference_batch


def sqrt_scaling(learning_rate: float, batch_size: int, reference_batch: int) -> float:
    """The same by the square root, which keeps the variance of a step as it was.

    Source: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks",
    section 5; usual with Adam and LAMB (You et al. 2020, "Large Batch Optimization for Deep
    Learning: Training BERT in 76 minutes", section 4.1).
    """
    return learning_rate * math.sqrt(batch_size / reference_batch)
