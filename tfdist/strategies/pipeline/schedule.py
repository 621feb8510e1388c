"""The schedule of a pipeline: in which order stages compute micro-batches, and how long that takes.

`"gpipe"` runs all forward passes, then all backward passes (Huang et al. 2019). With `"1f1b"` a
stage begins a micro-batch once it has finished the backward pass of an earlier one, so that it
keeps the activations of no more micro-batches than there are stages from it to the end (Narayanan
et al. 2019, "PipeDream"). With `"interleaved"` each of n devices has stages d, d + n, d + 2n, ...,
so that the pipeline fills and empties in shorter turns (Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2). `"zb"` is
`"1f1b"` with split backward passes: a stage computes the gradients of its weights, for which no
other stage waits, while it would wait itself (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
ZB-H1, but for the order of a forward pass and the gradients of weights after a backward pass).

The bubble is the share of time that stages wait while a pipeline fills and empties. With n stages
of equal cost and m micro-batches a step takes m + n - 1 turns, in m of which a stage computes
(Huang et al. 2019, "GPipe", section 2.3).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import tensorflow as tf

from tfdist.upstream.tensorflow_graphs import Dependencies, run_after

#: `"backward"` computes all gradients of a stage, or only those for which the stage before it
#: waits. Then `"weights"` computes the others.
Kind = Literal["forward", "backward", "weights"]


class Pass(NamedTuple):
    """The pass of a micro-batch through a stage: a turn of its device."""

    stage: int
    micro_batch: int
    kind: Kind


def micro_batches_in_memory(
    num_stages: int, num_micro_batches: int, order: str, num_devices: int | None = None
) -> list[int]:
    """Returns for how many micro-batches each stage keeps activations at most.

    Args:
        num_stages: The number of stages.
        num_micro_batches: Micro-batches per batch.
        order: `"gpipe"`: all of them; `"1f1b"`: as many as there are stages from it to the end;
            `"interleaved"`: more of them in early stages; `"zb"`: as many as there are stages, and
            one more except in the first stage.
        num_devices: As for `sequences`.
    """
    most, kept = [0] * num_stages, [0] * num_stages
    for sequence in sequences(order, num_stages, num_micro_batches, num_devices):
        for pass_ in sequence:
            last = "weights" if is_split(order, pass_.stage) else "backward"
            kept[pass_.stage] += (pass_.kind == "forward") - (pass_.kind == last)
            most[pass_.stage] = max(most[pass_.stage], kept[pass_.stage])
    return most


def is_split(order: str, stage: int) -> bool:
    """Returns whether the gradients of a stage's weights are a pass of their own.

    For the first stage's gradients no other stage waits: its backward pass is not split.
    """
    return order == "zb" and stage > 0


def input_of(pass_: Pass, num_stages: int) -> Pass | None:
    """Returns the pass that computes the input of a pass; None: its input is data."""
    stage, number, kind = pass_
    if kind == "weights":
        return Pass(stage, number, "backward")
    if kind == "forward":
        return Pass(stage - 1, number, kind) if stage else None
    if stage == num_stages - 1:
        return Pass(stage, number, "forward")
    return Pass(stage + 1, number, kind)


def device_of(stage: int, num_devices: int) -> int:
    """Returns the index of the device of a stage: the devices take the stages in turns."""
    return stage % num_devices


class Turn(NamedTuple):
    """A stage computes one micro-batch; times are relative to a step on one device."""

    stage: int
    micro_batch: int
    kind: Kind
    begin: float
    end: float


def turns(
    shares: Sequence[float], num_micro_batches: int, order: str, num_devices: int | None = None
) -> list[Turn]:
    """Returns the turns of a step, where a backward pass takes twice as long as a forward pass.

    Each part of a split backward pass takes as long as a forward pass.
    """
    left = sequences(order, len(shares), num_micro_batches, num_devices)
    done: dict[Pass, Turn] = {}
    free = [0.0] * len(left)
    while any(left):
        for device, sequence in enumerate(left):
            while sequence:
                needed = input_of(sequence[0], len(shares))
                if needed is not None and needed not in done:
                    break
                begin = max(free[device], done[needed].end if needed else 0.0)
                stage, _, kind = sequence[0]
                thirds = 2 if kind == "backward" and not is_split(order, stage) else 1
                free[device] = begin + shares[stage] / num_micro_batches * thirds / 3
                done[sequence[0]] = Turn(*sequence[0], begin, free[device])
                sequence.pop(0)
    return sorted(done.values())


def planned_speed_up(
    shares: Sequence[float], num_micro_batches: int, order: str, num_devices: int
) -> float:
    """Returns the largest possible speed-up over one device, in an order of the stages.

    With v equal stages on each of n devices, m a multiple of n, `"interleaved"` takes the time of
    m + (n - 1) / v turns; with n equal stages and m > n, `"zb"` that of m + n / 3.
    """
    if order in ("gpipe", "1f1b"):
        return speed_up(shares, num_micro_batches)
    return 1 / max(turn.end for turn in turns(shares, num_micro_batches, order, num_devices))


def speed_up(shares: Sequence[float], num_micro_batches: int) -> float:
    """Returns the largest possible speed-up over one device.

    The most expensive stage sets the pace: m - 1 turns of it, and one turn of each stage.
    """
    return num_micro_batches / ((num_micro_batches - 1) * max(shares) + sum(shares))


def sequences(
    order: str, num_stages: int, num_micro_batches: int, num_devices: int | None = None
) -> list[list[Pass]]:
    """Returns what each device computes, in order.

    Args:
        order: `"gpipe"`, `"1f1b"`, `"interleaved"` or `"zb"`.
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
    by_device = []
    for device in range(n):
        stages = [s for s in range(num_stages) if device_of(s, n) == device]
        forward = [Pass(s, i, "forward") for numbers in rounds for s in stages for i in numbers]
        back = [Pass(s, i, "backward") for nums in rounds for s in stages[::-1] for i in nums]
        # The device delays them as long as others wait for its backward passes. After a backward
        # pass, the next forward pass does not wait for them: the device has both in its queue.
        weights: list[Pass | None] = [None] * device
        if is_split(order, device):
            weights += [Pass(device, i, "weights") for i in range(num_micro_batches)]
        # Forward passes before the first backward pass.
        ahead = {
            "gpipe": len(forward),
            "1f1b": n - device,
            "interleaved": 2 * (n - device - 1) + (len(stages) - 1) * n + 1,
            "zb": n - device,
        }[order]
        mixed = itertools.zip_longest(back, forward[ahead:], weights)
        by_device.append(
            forward[:ahead] + [pass_ for some in mixed for pass_ in some if pass_ is not None]
        )
    return by_device


# ---- in a graph ----

#: For which passes before it on its device a pass waits: the last one of each of these kinds. A
#: backward pass, for which other stages wait, waits for a forward pass only if it is the first one.
_AWAITED: dict[Kind, tuple[Kind, ...]] = {
    "forward": ("forward", "backward", "weights"),
    "backward": ("backward",),
    "weights": ("backward",),
}


class Order:
    """Control dependencies between the passes of a graph, as the schedule of each device orders.

    Without them TensorFlow starts all micro-batches at once on the first stage, and nothing
    overlaps. While the graph is traced, a pass waits only for passes that were traced before it, so
    the order is never circular. If the loss or BatchNorm exchanges sums in the forward pass, all
    micro-batches have to be there: their forward passes are traced before any backward pass, and
    every order computes them first. `connect` adds the passes that were traced later.

    Args:
        name: As for `sequences`.
        num_stages: The number of stages.
        num_micro_batches: Micro-batches per batch.
        num_devices: The number of devices; None: one for each stage.
    """

    def __init__(
        self, name: str, num_stages: int, num_micro_batches: int, num_devices: int | None = None
    ) -> None:
        self._sequences = sequences(name, num_stages, num_micro_batches, num_devices)
        self._ends: dict[Pass, list[tf.Tensor]] = {}
        self._begins: dict[Pass, list[tf.Operation]] = {}
        self._awaited: dict[Pass, list[Pass]] = {}

    def before(self, pass_: Pass) -> list[tf.Tensor]:
        """Returns the tensors for which a pass waits before it begins."""
        awaited = self._traced_before(pass_, self._sequences)
        self._awaited.setdefault(pass_, awaited)
        return [tensor for earlier in awaited for tensor in self._ends[earlier]]

    def begins(self, pass_: Pass, gate: tf.Tensor) -> None:
        """Records a tensor with which a pass begins."""
        self._begins.setdefault(pass_, []).append(gate.op)

    def has_gone_forward(self, stage: int, micro_batch: int, outputs: list[tf.Tensor]) -> None:
        """Records the last outputs of a stage for a micro-batch."""
        self._ends[Pass(stage, micro_batch, "forward")] = outputs

    def has_gone_back(
        self, stage: int, micro_batch: int, gradients: list[tf.Tensor], of_weights: bool = False
    ) -> None:
        """Records gradients that a stage computed for a micro-batch."""
        pass_ = Pass(stage, micro_batch, "weights")
        if not of_weights or pass_ not in self._sequences[device_of(stage, len(self._sequences))]:
            pass_ = pass_._replace(kind="backward")
        self._ends.setdefault(pass_, []).extend(gradients)

    def connect(self) -> None:
        """Makes passes wait for those before them that were traced later; called after tracing.

        If an exchange of sums needs all forward passes first, they come first. Nothing is added if
        that is impossible, too, because of an exchange within the passes or side effects in both.
        """
        forward_first = [
            sorted(s, key=lambda pass_: pass_.kind != "forward") for s in self._sequences
        ]
        dependencies: Dependencies | None = None
        for planned in (self._sequences, forward_first):
            later = [
                (pass_, earlier)
                for pass_ in self._ends
                for earlier in self._traced_before(pass_, planned)
                if earlier not in self._awaited.get(pass_, [])
            ]
            if not later:
                return
            if dependencies is None:
                dependencies = Dependencies(tf.compat.v1.get_default_graph())
                self._find_begins_of_weights(dependencies)
            added = [(self._begins.get(pass_, []), self._ends[earlier]) for pass_, earlier in later]
            if not dependencies.would_be_circular(added):
                for begins, ends in added:
                    run_after(begins, ends)
                return

    def _traced_before(self, pass_: Pass, planned: Sequence[list[Pass]]) -> list[Pass]:
        """Returns the traced passes for which a pass waits: the last one of each awaited kind."""
        sequence = planned[device_of(pass_.stage, len(planned))]
        earlier = [each for each in sequence[: sequence.index(pass_)] if each in self._ends]
        last = {each.kind: each for each in earlier}
        awaited = [last[kind] for kind in _AWAITED[pass_.kind] if kind in last]
        return awaited or earlier[-1:]

    def _find_begins_of_weights(self, dependencies: Dependencies) -> None:
        """Records the first operations that compute gradients of weights and nothing else."""
        earlier: set[tf.Operation] = set()
        for pass_ in sorted(
            self._ends, key=lambda pass_: (pass_.micro_batch, pass_.kind == "weights")
        ):
            ends = [tensor.op for tensor in self._ends[pass_]]
            new = dependencies.needed([*self._begins.get(pass_, []), *ends], earlier)
            if pass_.kind == "weights":
                self._begins[pass_] = dependencies.first(new)
            earlier |= new
