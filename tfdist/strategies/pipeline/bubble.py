"""The bubble: the time for which stages wait while a pipeline fills and empties.

With n stages of equal cost and m micro-batches a step takes m + n - 1 turns, in each of which a
stage computes one of them, and every stage has work in m (Huang et al. 2019, "GPipe", section 2.3).
One forward, one backward (Narayanan et al. 2019, "PipeDream") has the same bubble with fewer
micro-batches in memory.
"""

from __future__ import annotations

from collections.abc import Sequence


def used(num_stages: int, num_micro_batches: int) -> float:
    """Returns the share of the time in which a stage computes, where all cost the same."""
    return num_micro_batches / (num_micro_batches + num_stages - 1)


def speed_up(shares: Sequence[float], num_micro_batches: int) -> float:
    """Returns how many times faster than one device stages are, at most.

    The dearest sets the pace: m - 1 turns of it, and one of each.

    Args:
        shares: Of the work of a whole batch, by stage; they add up to 1.
        num_micro_batches: Of a batch.
    """
    return num_micro_batches / ((num_micro_batches - 1) * max(shares) + sum(shares))


def in_memory(num_stages: int, num_micro_batches: int, order: str) -> list[int]:
    """Returns for how many micro-batches each stage keeps what it computed, at most.

    Args:
        num_stages: Of the pipeline.
        num_micro_batches: Of a batch.
        order: `"gpipe"`: all of them; `"1f1b"`: as many as are under way behind the stage.
    """
    if order == "gpipe":
        return [num_micro_batches] * num_stages
    return [min(num_micro_batches, num_stages - stage) for stage in range(num_stages)]
