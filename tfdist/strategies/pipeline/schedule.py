"""The schedule of a pipeline: in which order stages compute micro-batches, and how long that takes.

`"gpipe"` runs all forward passes, then all backward passes (Huang et al. 2019). With `"1f1b"` a
stage begins a micro-batch once it has finished the backward pass of an earlier one, so that it
keeps the activations of no more micro-batches than there are stages from it to the end (Narayanan
et al. 2019, "PipeDream").
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from tfdist.strategies.pipeline.stages import Stages


class Order:
    """Control dependencies between the stages and micro-batches of a graph while it is traced.

    Without them TensorFlow starts all micro-batches at once on the first stage, and nothing
    overlaps. An operation waits only for operations that were traced before it, so the order is
    never circular. If the loss or BatchNorm exchanges sums in the forward pass, all micro-batches
    have to be there, and `"1f1b"` computes as `"gpipe"` does.

    Args:
        name: `"gpipe"` or `"1f1b"`.
        num_stages: The number of stages.
        num_micro_batches: Micro-batches per batch.
    """

    def __init__(self, name: str, num_stages: int, num_micro_batches: int) -> None:
        self._name, self._num_stages = name, num_stages
        self._last_micro_batch = num_micro_batches - 1
        self._forward: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._backward: dict[tuple[int, int], list[tf.Tensor]] = {}

    def before_forward(self, stage: int, micro_batch: int) -> list[tf.Tensor]:
        """Returns the tensors for which a stage waits before it begins a micro-batch."""
        before = self._forward.get((stage, micro_batch - 1), [])
        if self._name == "1f1b":
            earlier = micro_batch - (self._num_stages - stage)
            before = before + self._backward.get((stage, earlier), [])
        return before

    def before_backward(self, stage: int, micro_batch: int) -> list[tf.Tensor]:
        """Returns the tensors for which a stage waits before a micro-batch's backward pass."""
        before = self._backward.get((stage, micro_batch - 1), [])
        if not before and self._name == "gpipe":
            return self._forward.get((stage, self._last_micro_batch), [])
        return before

    def has_gone_forward(self, stage: int, micro_batch: int, outputs: list[tf.Tensor]) -> None:
        """Records the last outputs of a stage for a micro-batch."""
        self._forward[stage, micro_batch] = outputs

    def has_gone_back(self, stage: int, micro_batch: int, gradients: list[tf.Tensor]) -> None:
        """Records gradients that a stage computed for a micro-batch."""
        self._backward.setdefault((stage, micro_batch), []).extend(gradients)

    def turns(self) -> dict[tuple[int, int, bool], list[tf.Tensor]]:
        """Returns the last tensors of each turn, by stage, micro-batch and whether backward."""
        forward = {(*key, False): own for key, own in self._forward.items()}
        return forward | {(*key, True): own for key, own in self._backward.items()}


def micro_batches_in_memory(num_stages: int, num_micro_batches: int, order: str) -> list[int]:
    """Returns for how many micro-batches each stage keeps activations at most.

    Args:
        num_stages: The number of stages.
        num_micro_batches: Micro-batches per batch.
        order: `"gpipe"`: all of them; `"1f1b"`: as many as there are stages from it to the end.
    """
    if order == "gpipe":
        return [num_micro_batches] * num_stages
    return [min(num_micro_batches, num_stages - stage) for stage in range(num_stages)]


class Turn(NamedTuple):
    """A stage computes one micro-batch; times are relative to a step on one device."""

    stage: int
    micro_batch: int
    back: bool
    begin: float
    end: float


def turns(shares: Sequence[float], num_micro_batches: int, order: str) -> list[Turn]:
    """Returns the turns of a step, where a backward pass takes twice as long as a forward pass.

    Args:
        shares: Each stage's share of the work.
        num_micro_batches: Micro-batches per batch.
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


def draw_timeline(stages: Stages, num_micro_batches: int, order: str, path: Path) -> None:
    """Draws the timeline of a step, one line per stage, from measured times if there are any.

    Args:
        stages: The stages of a model.
        num_micro_batches: Micro-batches per batch.
        order: As for `turns`.
        path: The image file.
    """
    from matplotlib.figure import Figure  # takes a second to import, and few need it

    shares = stages.shares() or [1 / stages.num_stages] * stages.num_stages
    all_turns = turns(shares, num_micro_batches, order)
    figure = Figure(figsize=(10, 1 + 0.6 * len(shares)), layout="constrained")
    axes = figure.subplots()
    for turn in all_turns:
        colour = "tab:orange" if turn.back else "tab:blue"
        span = [(turn.begin, turn.end - turn.begin)]
        axes.broken_barh(span, (turn.stage - 0.4, 0.8), facecolor=colour, edgecolor="white")
    axes.set_yticks(range(len(shares)), [" .. ".join(ends) for ends in stages.ends()])
    axes.invert_yaxis()
    axes.set_xlabel("time relative to a step on one device (blue: forward, orange: backward)")
    best = 1 / max(turn.end for turn in all_turns)
    cost = "as measured" if stages.shares() else "stages of equal cost"
    axes.set_title(
        f"{order}, {num_micro_batches} micro-batches, {cost}: {best:.2f} times one device"
    )
    figure.savefig(path)


def _sequence(ahead: int, num_micro_batches: int, order: str) -> list[tuple[int, bool]]:
    """Returns what a stage computes, in order: micro-batch, and whether backward.

    Args:
        ahead: How many micro-batches it may begin before the first backward pass, with `"1f1b"`.
        num_micro_batches: Micro-batches per batch.
        order: As for `turns`.
    """
    forward = [(number, False) for number in range(num_micro_batches)]
    back = [(number, True) for number in range(num_micro_batches)]
    if order == "gpipe":
        return forward + back
    first, rest = forward[:ahead], forward[ahead:]
    mixed = (pair for pairs in itertools.zip_longest(back, rest) for pair in pairs)
    return first + [turn for turn in mixed if turn is not None]
