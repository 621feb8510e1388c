"""When each stage computes what, by the order of the pipeline: the timeline, and its picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tfdist.strategies.pipeline.stages import Stages


class Turn(NamedTuple):
    """A stage computes a micro-batch, forward or back; times are in those of one device."""

    stage: int
    micro_batch: int
    back: bool
    begin: float
    end: float


def turns(shares: Sequence[float], num_micro_batches: int, order: str) -> list[Turn]:
    """Returns what the stages do in a step; the way back takes twice as long as the way there.

    Args:
        shares: Of the work of a whole batch, by stage.
        num_micro_batches: Of a batch.
        order: `"gpipe"` or `"1f1b"`.
    """
    last = len(shares) - 1
    left = [_sequence(last - s + 1, num_micro_batches, order) for s in range(len(shares))]
    done: dict[tuple[int, int, bool], Turn] = {}
    free = [0.0] * len(shares)
    while any(left):
        for stage, own in enumerate(left):
            while own:
                number, back = own[0]
                if back:
                    needed = (stage, number, False) if stage == last else (stage + 1, number, True)
                else:
                    needed = (stage - 1, number, False)
                if needed[0] >= 0 and needed not in done:
                    break
                before = done[needed].end if needed in done else 0.0
                begin = max(free[stage], before)
                length = shares[stage] / num_micro_batches * (2 / 3 if back else 1 / 3)
                done[stage, number, back] = Turn(stage, number, back, begin, begin + length)
                free[stage] = begin + length
                own.pop(0)
    return sorted(done.values())


def draw(stages: Stages, num_micro_batches: int, order: str, path: Path) -> None:
    """Draws the timeline, a line for each stage, by the times that were measured if any were.

    Args:
        stages: Of a model.
        num_micro_batches: Of a batch.
        order: As in `turns`.
        path: Of the picture.
    """
    from matplotlib.figure import Figure  # takes a second, which nobody else needs

    shares = stages.shares() or [1 / stages.num_stages] * stages.num_stages
    made = turns(shares, num_micro_batches, order)
    figure = Figure(figsize=(10, 1 + 0.6 * len(shares)), layout="constrained")
    axes = figure.subplots()
    for turn in made:
        colour = "tab:orange" if turn.back else "tab:blue"
        span = [(turn.begin, turn.end - turn.begin)]
        axes.broken_barh(span, (turn.stage - 0.4, 0.8), facecolor=colour, edgecolor="white")
    axes.set_yticks(range(len(shares)), [" .. ".join(ends) for ends in stages.ends()])
    axes.invert_yaxis()
    axes.set_xlabel("time, of a step on one device (blue: forward, orange: back)")
    best = 1 / max(turn.end for turn in made)
    cost = "as measured" if stages.shares() else "stages of equal cost"
    axes.set_title(
        f"{order}, {num_micro_batches} micro-batches, {cost}: {best:.2f} times one device"
    )
    figure.savefig(path)


def _sequence(ahead: int, num_micro_batches: int, order: str) -> list[tuple[int, bool]]:
    """What a stage does one after the other: numbers of micro-batches, and whether back.

    Args:
        ahead: How many it may have begun with `"1f1b"`.
        num_micro_batches: Of a batch.
        order: As in `turns`.
    """
    forward = [(number, False) for number in range(num_micro_batches)]
    back = [(number, True) for number in range(num_micro_batches)]
    if order == "gpipe":
        return forward + back
    first, rest = forward[:ahead], forward[ahead:]
    mixed = (pair for pairs in itertools.zip_longest(back, rest) for pair in pairs)
    return first + [turn for turn in mixed if turn is not None]
