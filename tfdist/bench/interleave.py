"""Comparing contenders on a machine whose speed drifts: taking turns, ratios within a round."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

K = TypeVar("K")
T = TypeVar("T")


class Spread(NamedTuple):
    """The middle of some numbers, and the quarter and three-quarter points around it."""

    median: float
    low: float
    high: float


def take_turns(contenders: Mapping[K, Callable[[], T]], num_rounds: int) -> dict[K, list[T]]:
    """Measures each contender once a round; who begins moves on by one each round.

    Args:
        contenders: Functions that measure once, warmed up.
        num_rounds: Measurements of each.

    Returns:
        The measurements of each contender, in the order of the rounds.
    """
    names = list(contenders)
    taken: dict[K, list[T]] = {name: [] for name in names}
    # Otherwise a collection walks all that TensorFlow imported, in somebody's measurement.
    gc.collect()
    gc.freeze()
    for number in range(num_rounds):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            taken[name].append(contenders[name]())
    gc.unfreeze()
    return taken


def spread(values: Sequence[float]) -> Spread:
    """Returns median and quartiles."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return Spread(median, low, high)


def ratio(of: Sequence[float], to: Sequence[float]) -> Spread:
    """Returns the spread of the ratios of two contenders' measurements, round by round."""
    return spread([a / b for a, b in zip(of, to, strict=True)])
