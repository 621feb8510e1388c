"""The schedule of a pipeline: in which order stages compute micro-batches, and how long that takes.

`"gpipe"` runs all forward passes, then all backward passes (Huang et al. 2019). With `"1f1b"` a
stage begins a micro-batch once it has finished the backward pass of an earlier one, so that it
keeps the activations of no more micro-batches than there are stages from it to the end (Narayanan
et al. 2019, "PipeDream"). With `"interleaved"` each of n devices has stages d, d + n, d + 2n, ...,
so that the pipeline fills and empties in shorter turns (Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2).
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from tfdist.strategies.pipeline.stages import Stages
from tfdist.upstream.tensorflow_graphs import in_order_of_effects, run_after


class Pass(NamedTuple):
    """The forward or backward pass of a micro-batch through a stage: a turn of its device."""

    stage: int
    micro_batch: int
    back: bool


class Order:
    """Control dependencies between the stages and micro-batches of a graph while it is traced.

    Without them TensorFlow starts all micro-batches at once on the first stage, and nothing
    overlaps. An operation waits only for operations that were traced before it, so the order is
    never circular. If the loss or BatchNorm exchanges sums in the forward pass, all micro-batches
    have to be there, and `"1f1b"` computes as `"gpipe"` does. Only `"interleaved"` adds control
    dependencies afterwards, by `connect`.

    Args:
        name: `"gpipe"`, `"1f1b"` or `"interleaved"`.
        num_stages: The number of stages.
        num_micro_batches: Micro-batches per batch.
        num_devices: The number of devices; None: one for each stage.
    """

    def __init__(
        self, name: str, num_stages: int, num_micro_batches: int, num_devices: int | None = None
    ) -> None:
        self._name, self._num_stages = name, num_stages
        self._num_micro_batches, self._num_devices = num_micro_batches, num_devices or num_stages
        self._ends: dict[Pass, list[tf.Tensor]] = {}
        self._begins: dict[Pass, list[tf.Tensor]] = {}

    def before_forward(self, stage: int, micro_batch: int) -> list[tf.Tensor]:
        """Returns the tensors for which a stage waits before it begins a micro-batch."""
        before = self._ends.get(Pass(stage, micro_batch - 1, False), [])
        if self._name == "1f1b":
            earlier = micro_batch - (self._num_stages - stage)
            before = before + self._ends.get(Pass(stage, earlier, True), [])
        return before

    def before_backward(self, stage: int, micro_batch: int) -> list[tf.Tensor]:
        """Returns the tensors for which a stage waits before a micro-batch's backward pass."""
        before = self._ends.get(Pass(stage, micro_batch - 1, True), [])
        if not before and self._name == "gpipe":
            return self._ends.get(Pass(stage, self._num_micro_batches - 1, False), [])
        return before

    def begins(self, stage: int, micro_batch: int, back: bool, gate: tf.Tensor) -> None:
        """Records a tensor with which a pass begins."""
        self._begins.setdefault(Pass(stage, micro_batch, back), []).append(gate)

    def has_gone_forward(self, stage: int, micro_batch: int, outputs: list[tf.Tensor]) -> None:
        """Records the last outputs of a stage for a micro-batch."""
        self._ends[Pass(stage, micro_batch, False)] = outputs

    def has_gone_back(self, stage: int, micro_batch: int, gradients: list[tf.Tensor]) -> None:
        """Records gradients that a stage computed for a micro-batch."""
        self._ends.setdefault(Pass(stage, micro_batch, True), []).extend(gradients)

    def connect(self) -> None:
        """Makes each pass wait for the one before it on its device, in the interleaved order.

        Called when all passes are traced, because a pass may wait for one that was traced later.
        Nothing is added if an exchange of sums, or side effects in both passes, need another order.
        """
        if self._name != "interleaved" or not self._begins:
            return
        planned = sequences(
            self._name, self._num_stages, self._num_micro_batches, self._num_devices
        )
        added: list[tuple[list[tf.Operation], list[tf.Tensor]]] = []
        for sequence in planned:
            traced = [own for own in sequence if own in self._ends]
            for before, after in itertools.pairwise(traced):
                gates = [gate.op for gate in self._begins.get(after, [])]
                added.append((gates, self._ends[before]))
        if not _is_circular(added):
            for gates, ends in added:
                run_after(gates, ends)

    def turns(self) -> dict[Pass, list[tf.Tensor]]:
        """Returns the last tensors of each turn, by stage, micro-batch and whether backward."""
        return self._ends


def _is_circular(added: Sequence[tuple[list[tf.Operation], list[tf.Tensor]]]) -> bool:
    """Returns whether operations would wait for each other if they waited for more tensors."""
    graph = tf.compat.v1.get_default_graph()
    before = {
        operation: [*(t.op for t in operation.inputs), *operation.control_inputs]
        for operation in graph.get_operations()
    }
    for operation, earlier in in_order_of_effects(graph).items():
        before[operation] += earlier
    for gates, ends in added:
        for gate in gates:
            before[gate] += [end.op for end in ends]
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError:
        return True
    return False


def micro_batches_in_memory(
    num_stages: int, num_micro_batches: int, order: str, num_devices: int | None = None
) -> list[int]:
    """Returns for how many micro-batches each stage keeps activations at most.

    Args:
        num_stages: The number of stages.
        num_micro_batches: Micro-batches per batch.
        order: `"gpipe"`: all of them; `"1f1b"`: as many as there are stages from it to the end;
            `"interleaved"`: more of them in early stages.
        num_devices: As for `sequences`.
    """
    most, kept = [0] * num_stages, [0] * num_stages
    for sequence in sequences(order, num_stages, num_micro_batches, num_devices):
        for own in sequence:
            kept[own.stage] += -1 if own.back else 1
            most[own.stage] = max(most[own.stage], kept[own.stage])
    return most


def device_of(stage: int, num_devices: int) -> int:
    """Returns the index of the device of a stage: the devices take the stages in turns."""
    return stage % num_devices


class Turn(NamedTuple):
    """A stage computes one micro-batch; times are relative to a step on one device."""

    stage: int
    micro_batch: int
    back: bool
    begin: float
    end: float


def turns(
    shares: Sequence[float], num_micro_batches: int, order: str, num_devices: int | None = None
) -> list[Turn]:
    """Returns the turns of a step, where a backward pass takes twice as long as a forward pass.

    Args:
        shares: Each stage's share of the work.
        num_micro_batches: Micro-batches per batch.
        order: As for `sequences`.
        num_devices: As for `sequences`.
    """
    last = len(shares) - 1
    left = sequences(order, len(shares), num_micro_batches, num_devices)
    done: dict[Pass, Turn] = {}
    free = [0.0] * len(left)
    while any(left):
        for device, own in enumerate(left):
            while own:
                stage, number, back = own[0]
                if back:
                    needed = Pass(min(stage + 1, last), number, stage != last)
                else:
                    needed = Pass(stage - 1, number, False)
                if needed.stage >= 0 and needed not in done:
                    break
                before = done[needed].end if needed in done else 0.0
                begin = max(free[device], before)
                length = shares[stage] / num_micro_batches * (2 / 3 if back else 1 / 3)
                free[device] = begin + length
                done[own[0]] = Turn(*own[0], begin, free[device])
                own.pop(0)
    return sorted(done.values())


def draw_timeline(
    stages: Stages, num_micro_batches: int, order: str, path: Path, num_devices: int | None = None
) -> None:
    """Draws the timeline of a step, one line per device, from measured times if there are any.

    Args:
        stages: The stages of a model.
        num_micro_batches: Micro-batches per batch.
        order: As for `turns`.
        path: The image file.
        num_devices: As for `turns`.
    """
    from matplotlib.figure import Figure  # takes a second to import, and few need it

    lines = num_devices or stages.num_stages
    shares = stages.shares() or [1 / stages.num_stages] * stages.num_stages
    all_turns = turns(shares, num_micro_batches, order, lines)
    figure = Figure(figsize=(10, 1 + 0.6 * lines), layout="constrained")
    axes = figure.subplots()
    for turn in all_turns:
        colour = "tab:orange" if turn.back else "tab:blue"
        span = [(turn.begin, turn.end - turn.begin)]
        place = (device_of(turn.stage, lines) - 0.4, 0.8)
        axes.broken_barh(span, place, facecolor=colour, edgecolor="white")
    names = [" .. ".join(ends) for ends in stages.ends()]
    axes.set_yticks(range(lines), ["\n".join(names[line::lines]) for line in range(lines)])
    axes.invert_yaxis()
    axes.set_xlabel("time relative to a step on one device (blue: forward, orange: backward)")
    best = 1 / max(turn.end for turn in all_turns)
    cost = "as measured" if stages.shares() else "stages of equal cost"
    axes.set_title(
        f"{order}, {num_micro_batches} micro-batches, {cost}: {best:.2f} times one device"
    )
    figure.savefig(path)


def sequences(
    order: str, num_stages: int, num_micro_batches: int, num_devices: int | None = None
) -> list[list[Pass]]:
    """Returns what each device computes, in order.

    Args:
        order: `"gpipe"`, `"1f1b"` or `"interleaved"`.
        num_stages: The number of stages.
        num_micro_batches: Micro-batches per batch.
        num_devices: The number of devices, which take the stages in turns; None: one for each.
    """
    n = num_devices or num_stages
    # Micro-batches that go through all stages of a device before the next ones begin.
    size = n if order == "interleaved" else num_micro_batches
    rounds = [
        range(begin, min(begin + size, num_micro_batches))
        for begin in range(0, num_micro_batches, size)
    ]
    found = []
    for device in range(n):
        stages = [s for s in range(num_stages) if device_of(s, n) == device]
        forward = [Pass(s, i, False) for numbers in rounds for s in stages for i in numbers]
        back = [Pass(s, i, True) for numbers in rounds for s in stages[::-1] for i in numbers]
        # Forward passes before the first backward pass.
        ahead = {
            "gpipe": len(forward),
            "1f1b": n - device,
            "interleaved": 2 * (n - device - 1) + (len(stages) - 1) * n + 1,
        }[order]
        mixed = itertools.zip_longest(back, forward[ahead:])
        found.append(forward[:ahead] + [own for pair in mixed for own in pair if own is not None])
    return found
