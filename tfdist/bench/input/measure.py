"""Images per second of every contender, in turns."""

from __future__ import annotations

import functools
import time
from typing import Any

from tfdist.bench.input.contenders import LIMIT, OURS, PACKED, Contender
from tfdist.bench.input.photographs import Photographs
from tfdist.bench.interleave import ratio, spread, take_turns

#: At least this fraction of the limit, and this many times every other.
LIMIT_GOAL, OTHERS_GOAL = 0.95, 1.5
_WARM_UP_STEPS = 3  # until workers run and buffers hold what they will


def compare(
    contenders: dict[str, Contender], made: Photographs, num_images: int, num_rounds: int
) -> dict[str, dict[str, Any]]:
    """Measures each contender once a round.

    Args:
        contenders: by name.
        made: what they read.
        num_images: of one measurement.
        num_rounds: measurements of each.

    Returns:
        For each contender `images_per_s` (median, low, high) and `samples`; `ratio`, of ours from
        the originals to it, and `packed_ratio`, of ours packed at size. The first has a `goal` to
        the limit, the second to the others, and whether it was `met`.
    """
    turns = {
        name: functools.partial(_rate, contender, made, num_images)
        for name, contender in contenders.items()
    }
    taken = take_turns(turns, num_rounds)
    results: dict[str, dict[str, Any]] = {}
    for name, samples in taken.items():
        results[name] = {"images_per_s": spread(samples)._asdict(), "samples": samples}
        if name == LIMIT:
            results[name]["ratio"] = _compared(taken[OURS], samples, LIMIT_GOAL)
        elif name not in (OURS, PACKED):
            results[name]["ratio"] = ratio(taken[OURS], samples)._asdict()
            results[name]["packed_ratio"] = _compared(taken[PACKED], samples, OTHERS_GOAL)
    return results


def _compared(ours: list[float], other: list[float], goal: float) -> dict[str, Any]:
    compared = ratio(ours, other)
    return compared._asdict() | {"goal": goal, "met": compared.median >= goal}


def _rate(contender: Contender, made: Photographs, num_images: int) -> float:
    """Images per second, from the first batches on; what was started ends with it."""
    steps = contender(made)
    for _ in range(_WARM_UP_STEPS):
        next(steps)
    count, begin = 0, time.perf_counter()
    while count < num_images:
        count += next(steps)
    return count / (time.perf_counter() - begin)
