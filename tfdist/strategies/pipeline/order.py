"""The order in which a traced graph computes the passes of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.strategies.pipeline.schedule import Kind, Pass, device_of, sequences
from tfdist.upstream.tensorflow_graphs import Dependencies, run_after

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
        name: As for `schedule.sequences`.
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
