"""Cutting a chain of costs into runs, the dearest of which is as cheap as can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence


def places(length: int, spans: Iterable[tuple[int, int]]) -> list[int]:
    """Returns where a chain may be cut: a place is the number of the first element behind the cut.

    Args:
        length: Of the chain.
        spans: First and last element of what has to stay together.
    """
    closed = {place for first, last in spans for place in range(first + 1, last + 1)}
    return [place for place in range(1, length) if place not in closed]


def cut(costs: Sequence[Sequence[float]], allowed: Sequence[int]) -> list[int]:
    """Returns the places of the cuts that make the dearest run cheapest.

    By the recurrence of the linear partition problem (Skiena, "The Algorithm Design Manual",
    section 8.5): the best cut of the first elements into so many runs, for ever more of both.

    Args:
        costs: By run, at least one: of each element, not negative, were it in that run.
        allowed: Places where a cut may be, ascending.

    Raises:
        ValueError: There are fewer places than cuts.
    """
    num_runs = len(costs)
    if len(allowed) < num_runs - 1:
        raise ValueError(f"{num_runs} runs need {num_runs - 1} cuts, of {len(allowed)} places")
    ends = [0, *allowed, len(costs[0])]
    first = [0.0, *itertools.accumulate(costs[0])]
    # By the number of a place among the ends: the dearest run up to there, and the cuts before.
    best: list[tuple[float, list[int]]] = [(first[end], []) for end in ends]
    for run, own in enumerate(costs[1:], 1):
        sums = [0.0, *itertools.accumulate(own)]
        best = [
            min(
                (
                    (max(best[j][0], sums[ends[i]] - sums[ends[j]]), [*best[j][1], ends[j]])
                    for j in range(run, i)
                ),
                default=(float("inf"), []),
            )
            for i in range(len(ends))
        ]
    return best[-1][1]
