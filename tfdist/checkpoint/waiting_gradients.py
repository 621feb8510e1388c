"""Gradients that wait on each replica for batches to come (`gradient_accumulation_steps`).

Each replica has a part of the sum. The parts are kept as they are where all are in one process, so
that a training which goes on over as many replicas adds up the same numbers in the same order. For
other replicas, and over several workers, it is their sum that goes on, on the first replica.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.strategies.base import Strategy

#: By replica and by variable.
Parts = Sequence[Sequence[np.ndarray]]


def take(strategy: Strategy, waiting: Sequence[Sequence[tf.Variable]]) -> list[list[np.ndarray]]:
    """Returns what waits on all replicas; called on all workers together."""
    parts = [[variable.numpy() for variable in own] for own in waiting]
    return parts if strategy.num_workers == 1 else [strategy.add_up(_total(parts))]


def give(strategy: Strategy, waiting: Sequence[Sequence[tf.Variable]], parts: Parts) -> None:
    """Gives replicas what waited on those of another training.

    Args:
        strategy: Of the workers.
        waiting: The variables of this worker's replicas.
        parts: Of all replicas of the other training.
    """
    if strategy.num_workers > 1 or len(parts) != len(waiting):
        total = _total(parts)
        nothing = [np.zeros_like(value) for value in total]
        first = nothing if strategy.rank else total
        parts = [first, *[nothing] * (len(waiting) - 1)]
    for own, values in zip(waiting, parts, strict=True):
        for variable, value in zip(own, values, strict=True):
            variable.assign(value)


def _total(parts: Parts) -> list[np.ndarray]:
    return [np.sum(values, axis=0, dtype=values[0].dtype) for values in zip(*parts, strict=True)]
