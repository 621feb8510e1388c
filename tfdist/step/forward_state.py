"""What a forward pass changes besides gradients: metrics, moving statistics, seeds.

A replica runs in a `keras.StatelessScope`, where assignments are kept aside. What they come to is
part of what the share contributes, is summed with the gradients, and is written to every copy of
the variables alike. So any copy holds the state of all replicas, at any time, also where it is
saved or evaluated.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.step import batch_norm
from tfdist.step.mean_or_sum import Kind, Kinds
from tfdist.step.replica import Replica

#: Keeps the random numbers of replicas and rounds apart: added to a seed, times the part's number.
#: Part 0 draws what one device draws.
SEED_STRIDE = 0x9E3779B9


class ForwardState:
    """The variables of a model that a forward pass may move, and how parts of them add up.

    Args:
        model: Whose.
        kinds: Tells how user code's values add up.
        writes_alone: As `Strategy.writes_alone`.
    """

    def __init__(self, model: keras.Model, kinds: Kinds, writes_alone: bool = True) -> None:
        self.kinds, self._writes_alone = kinds, writes_alone
        self._seeds = seeds_of(model)
        self._metrics = model.metrics_variables
        others = {id(v) for v in self._seeds + self._metrics}
        self._states = [v for v in model.variables if id(v) not in others]
        self._statistics = {id(v) for layer in batch_norm.layers_of(model) for v in layer.variables}
        self._added: list[keras.Variable] = []  # metrics, summed over the shares
        self._whole: list[keras.Variable] = []  # metrics that see whole batches
        self._summed: list[tuple[keras.Variable, Kind]] = []
        self._same: list[keras.Variable] = []

    def sees_whole_batches(self, replica: Replica) -> bool:
        """Tells whether a metric has to be updated with all shares together."""
        return replica.num_parts > 1 and bool(self.kinds.whole_metrics())

    def scope(self, replica: Replica) -> keras.StatelessScope:
        """The state as a replica finds it: its own seeds, and metrics that start from zero.

        Metrics that see whole batches go on from where they are, alike on every replica.
        """
        alone = replica.num_parts == 1 and self._writes_alone  # nobody else adds anything
        whole = frozenset() if alone else self.kinds.whole_metrics()
        self._whole = [v for v in self._metrics if alone or id(v) in whole]
        self._added = [v for v in self._metrics if not alone and id(v) not in whole]
        seeds = [(v, v + offset(v, replica.part)) for v in self._seeds]
        metrics = [(v, tf.zeros(v.shape, v.dtype)) for v in self._added]
        return keras.StatelessScope(seeds + metrics, collect_losses=True)

    def changes(self, scope: keras.StatelessScope, replica: Replica) -> dict[str, list]:
        """Returns this part of what the forward pass changed."""
        values = [(v, scope.get_current_value(v)) for v in self._states]
        moved = [(v, new, self._kind(v, replica)) for v, new in values if new is not None]
        same = [(v, new) for v, new, kind in moved if _is_counter(v, kind)]
        summed = [(v, new, kind) for v, new, kind in moved if not _is_counter(v, kind)]
        self._same = self._seeds + [v for v, _ in same]
        self._summed = [(v, kind) for v, _, kind in summed]
        seeds = [scope.get_current_value(v) - offset(v, replica.part) for v in self._seeds]
        return {
            "metrics": [scope.get_current_value(v) for v in self._added],
            "whole_metrics": [scope.get_current_value(v) for v in self._whole],
            "states": [_part(v, new, kind, replica) for v, new, kind in summed],
            "same": seeds + [new for _, new in same],
        }

    def commit(self, sums: dict[str, list]) -> None:
        """Writes seeds, counters and statistics to one copy of the variables."""
        for (variable, kind), new in zip(self._summed, sums["states"], strict=True):
            variable.assign(variable + new if kind is Kind.SUM else new)
        for variable, new in zip(self._same, sums["same"], strict=True):
            variable.assign(new)

    def commit_metrics(self, sums: dict[str, list]) -> tf.Tensor:
        """Moves the metrics' states in one copy; returns a tensor that is ready thereafter."""
        for variable, change in zip(self._added, sums["metrics"], strict=True):
            variable.assign_add(change)
        for variable, new in zip(self._whole, sums["whole_metrics"], strict=True):
            variable.assign(new)
        return tf.identity(self._metrics[-1].value) if self._metrics else tf.constant(0)

    def _kind(self, variable: keras.Variable, replica: Replica) -> Kind:
        # BatchNorm's moments of a share are averaged by rows: exact for the mean, and for both
        # with synchronised moments, which are alike on every replica.
        if replica.num_parts == 1 or id(variable) in self._statistics:
            return Kind.MEAN
        return self.kinds.of_state(variable)


def seeds_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the seeds of the random layers of a model, nested ones too."""
    generators = (getattr(layer, "_seed_generators", []) for layer in model._flatten_layers())
    return [generator.state for own in generators for generator in own]


def offset(seed: keras.Variable, part: int | tf.Tensor) -> tf.Tensor:
    """What a part adds to a seed's state, `[seed, count]`, to draw numbers of its own."""
    part = tf.cast(part, seed.dtype)
    return tf.stack([part * tf.cast(SEED_STRIDE, seed.dtype), tf.zeros((), seed.dtype)])


def _is_counter(variable: keras.Variable, kind: Kind) -> bool:
    """Whether a state is an integer that moves alike on every replica."""
    return kind is Kind.MEAN and not keras.backend.is_float_dtype(variable.dtype)


def _part(variable: keras.Variable, new: Any, kind: Kind, replica: Replica) -> tf.Tensor:
    """This part of a state: its change where changes add up, its weighted value otherwise."""
    if replica.num_parts == 1:
        return new
    if kind is Kind.SUM:
        return new - variable
    weighted = new * tf.cast(replica.fraction, new.dtype)
    # Moments of no rows are NaN, which a weight of zero would not take out.
    return tf.where(replica.num_rows > 0, weighted, tf.zeros_like(weighted))
