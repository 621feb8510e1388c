"""Compares variants on a machine whose speed varies: runs them in turns, with ratios per round."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

K = TypeVar("K")
T = TypeVar("T")

#: Explanation of spreads in tables.
NOTE = "Medians, with quartiles in brackets."


#: The `median` of some measurements, and their quartiles as `low` and `high`.
Spread = dict[str, float]


def run_in_turns(contenders: Mapping[K, Callable[[], T]], num_rounds: int) -> dict[K, list[T]]:
    """Measures each variant once per round. Each round starts with a different variant.

    Args:
        contenders: Functions that measure once, after a warm-up.
        num_rounds: Measurements of each variant.

    Returns:
        The measurements of each variant, in the order of the rounds.
    """
    names = list(contenders)
    samples: dict[K, list[T]] = {name: [] for name in names}
    # A full garbage collection during a measurement would visit all objects of TensorFlow.
    gc.collect()
    gc.freeze()
    for number in range(num_rounds):
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            samples[name].append(contenders[name]())
    gc.unfreeze()
    return samples


def spread(values: Sequence[float]) -> Spread:
    """Returns median and quartiles."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"median": median, "low": low, "high": high}


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Returns the spread of the ratios of two variants' measurements, round by round."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def as_text(values: Mapping[str, float], form: str = ".2f") -> str:
    """Returns a spread as `median (low-high)`.

    Args:
        values: A spread.
        form: Format of each number.
    """
    return f"{values['median']:{form}} ({values['low']:{form}}-{values['high']:{form}})"
