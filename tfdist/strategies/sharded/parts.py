"""What is sharded alike, whoever the owners of the parts are: devices, or processes.

In the manner of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"). What of a weight is computed element by element is cut into a part an owner;
what is not (a table of embeddings, matrices of Muon) stays whole.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from tfdist.errors import UnsupportedModelError
from tfdist.strategies import STRATEGIES
from tfdist.strategies.base import Strategy
from tfdist.strategies.sharded import plan
from tfdist.upstream import keras_variables
from tfdist.upstream.keras_callbacks import swap_by_assignment
from tfdist.upstream.keras_optimizers import refuse_elsewhere, slots_of, told_of_slots
from tfdist.upstream.keras_variables import Division, ShardedVariable
from tfdist.upstream.tensorflow_tapes import know_parts


class Parts(Strategy):
    """A strategy whose owners keep parts; stands before the one that computes.

    A subclass calls `divide_over` in its `__init__`.

    Attributes:
        shard: What is divided.
        copies_weights: Whether who computes also has the weights whole.
    """

    name = "sharded"
    has_local_variables = False
    #: Who keeps what is not cut.
    rest_is = "each on one device"
    is_rest_copied = False

    def divide_over(self, owners: Sequence[str], shard: str, smallest: int, offload: str) -> None:
        """Says who has the parts.

        Args:
            owners: Their names, by part.
            shard: As of `Sharded`.
            smallest: As there.
            offload: As there.

        Raises:
            ConfigurationError: Another `shard` or `offload`.
        """
        STRATEGIES["sharded"].check(shard=shard, offload=offload)
        self._is_offloaded = offload == "optimizer"
        self._places = ["CPU:0"] * len(self.devices) if self._is_offloaded else self.devices
        self.shard, self.copies_weights = shard, shard != "parameters"
        self._owners, self._smallest = list(owners), max(smallest, len(owners))
        self._placed: dict[str, str] = {}
        swap_by_assignment()
        know_parts()

    def division_of(self, variable: keras.Variable) -> Division:
        """Returns how a variable is divided among the owners."""
        raise NotImplementedError

    def describe(self) -> dict[str, str]:
        rows = super().describe() | {"sharded": plan.WHAT[self.shard]} | self._placed
        if self._is_offloaded:
            rows["offloaded"] = "what the optimizer keeps and changes of what is split, to the host"
        return rows

    def place(self, model: keras.Model) -> None:
        if not model.built or model.optimizer is None:
            return
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        planned = plan.plan(model, [optimizer], self._owners, self._smallest)
        self._placed = {"split": planned.describe(len(self._owners), self.rest_is)}
        if (state := plan.state_of(optimizer)) is not None:
            held = planned.bytes_by_owner(
                self._owners, state, self.copies_weights, self.is_rest_copied
            )
            each = ", ".join(f"{owner} {num / 1e6:,.1f} MB" for owner, num in held.items())
            self._placed["weights and optimizer state"] = each

    @contextmanager
    def making_state(self, model: keras.Model) -> Iterator[None]:
        """Divides what an optimizer keeps as soon as it is made, so that it never is whole.

        On every rank it begins with the same numbers, which do not come from weights.
        """
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        planned = plan.plan(model, [optimizer], self._owners, self._smallest)
        cut = {id(weight) for weight in planned.cut}

        def divide(slot: keras.Variable, weight: keras.Variable) -> None:
            if id(weight) in cut and slot.shape == weight.shape:
                self._divide(slot, keep_whole=False)

        with told_of_slots(divide):
            yield

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        super().prepare(model, optimizers)
        plain = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
        planned = plan.plan(model, plain, self._owners, self._smallest)
        slots: dict[int, list[keras.Variable]] = {}
        for slot, weight in (pair for optimizer in plain for pair in slots_of(optimizer)):
            slots.setdefault(id(weight), []).append(slot)
        for weight in planned.cut:
            self._cut(weight, slots.get(id(weight), []))
        for weight, owner in planned.homes:
            self.keep_whole(weight, slots.get(id(weight), []), owner)
        for optimizer in plain if planned.cut else ():
            refuse_elsewhere(optimizer, keras_variables.ELSEWHERE)
        if self.copies_weights:
            self.sync_copies(model.variables)
        gc.collect()  # what was whole may hang on cycles, which Python breaks up when it likes

    def _cut(self, weight: keras.Variable, slots: list[keras.Variable]) -> None:
        """Gives each owner its part of a weight's state."""
        if not isinstance(weight, ShardedVariable):
            self._divide(weight, self.copies_weights)
        for slot in slots:
            if not isinstance(slot, ShardedVariable) and slot.shape == weight.shape:
                self._divide(slot, keep_whole=False)

    def _divide(self, variable: keras.Variable, keep_whole: bool) -> None:
        division = self.division_of(variable)
        keras_variables.divide(variable, division, self._places, keep_whole)

    def keep_whole(
        self, weight: keras.Variable, slots: Sequence[keras.Variable], owner: str
    ) -> None:
        """Leaves the state of a weight whole.

        Args:
            weight: That is not cut.
            slots: What its optimizer keeps about it.
            owner: Who has least so far.
        """
        del owner
        for variable in [weight, *slots]:
            if isinstance(variable, ShardedVariable):  # it could be cut before
                keras_variables.unite(variable, self.devices[0])

    def check_table(self, table: keras.Variable) -> None:
        if self.shard != "optimizer" and isinstance(table, ShardedVariable):
            raise UnsupportedModelError(
                f"{table.path!r} is a table that no Embedding holds, and its gradients of rows "
                "cannot be cut: use keras.layers.Embedding, strategy 'towers', or "
                f"Sharded(smallest=N) with more than its {table.shape.num_elements()} elements."
            )

    def sync_copies(self, variables: Sequence[keras.Variable]) -> None:
        for weight in variables if self.copies_weights else ():
            if isinstance(weight, ShardedVariable) and weight.is_whole:
                weight.assign_parts(weight.value)

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        for weight in variables if self.copies_weights else ():
            if isinstance(weight, ShardedVariable) and weight.is_whole:
                weight.value.assign(weight.joined())
