"""The largest number that fits, in few tries: doubling, then bisecting. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

#: What is left free, because what a step takes is not the same in all steps.
_MARGIN = 0.1
#: Between what fits and what does not, where a further try would say no more than the margin.
_NEAR = 0.05


def largest(fits: Callable[[int], bool], first: int, most: int) -> int:
    """Returns about the largest number that fits, which was tried; 0 where the first does not.

    Args:
        fits: Tries one; where it does not fit, no larger one does.
        first: The first try, from which on it is doubled.
        most: No number is larger.
    """
    low, high = 0, min(first, most)
    while fits(high):
        if high == most:
            return high
        low, high = high, min(2 * high, most)
    while low and high - low > max(1, low * _NEAR):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def with_margin(number: int) -> int:
    """Returns a tenth less, a multiple of 8 where it is larger than that: kernels like it."""
    less = max(1, int(number * (1 - _MARGIN)))
    return less - less % 8 if less > 8 else less
