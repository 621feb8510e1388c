"""Learning-rate schedules with warm-up, scaling with the batch size, and growing batches."""

from __future__ import annotations

from tfdist.schedules.from_config import (
    batch_sizes,
    describe,
    learning_rate,
    linear_scaling,
    peak,
    sqrt_scaling,
)
from tfdist.schedules.rules import (
    LearningRate,
    Warmup,
    constant,
    cosine,
    one_cycle,
    polynomial,
    step,
)

__all__ = [
    "LearningRate",
    "Warmup",
    "batch_sizes",
    "constant",
    "cosine",
    "describe",
    "learning_rate",
    "linear_scaling",
    "one_cycle",
    "peak",
    "polynomial",
    "sqrt_scaling",
    "step",
]
