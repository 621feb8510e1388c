"""What a forward pass changes besides gradients: metrics, moving statistics, seeds.

A replica runs in a `keras.StatelessScope`, where assignments are kept aside. What they come to is
among what the share contributes, is summed with the gradients, and is written to every copy of
the variables alike. So any copy holds the state of all replicas, at any time, also where it is
saved or evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.step import batch_norm
from tfdist.step.lookups import Lookups
from tfdist.step.parameter_gather import Scope
from tfdist.step.reductions import Reduction, ReductionProbe
from tfdist.step.replica import Replica
from tfdist.upstream.keras_model import global_generator, seeds_of, use_global_generator

#: Keeps the random numbers of replicas and rounds apart: added to a seed, times the microbatch's
#: number. The first draws what one device draws.
SEED_STRIDE = 0x9E3779B9


class Changes(NamedTuple):
    """What a share changes in the variables of a list, by their place in it.

    Attributes:
        added: Summed over the shares, then added to the variable.
        averaged: New values weighted by rows: their sum over the shares is the new value.
        same: New values that are the same on every share, and do not cross.
    """

    added: dict[int, Any]
    averaged: dict[int, Any]
    same: dict[int, Any]

    def crossing(self) -> Changes:
        """Returns them with all that is no integer among what crosses the replicas."""
        floats = {i: new for i, new in self.same.items() if new.dtype.is_floating}
        same = {i: new for i, new in self.same.items() if i not in floats}
        return Changes(self.added, self.averaged | floats, same)

    def nothing(self, zero: int | tf.Tensor) -> Changes:
        """Returns zeros for all that crosses."""
        return Changes(
            {i: nothing_like(change, zero) for i, change in self.added.items()},
            {i: nothing_like(change, zero) for i, change in self.averaged.items()},
            self.same,
        )


class ForwardState:
    """The variables of a model that a forward pass may move, and how shares move them.

    Args:
        model: Whose.
        reductions: Tells how user code's values add up.
        lookups: Tells whose rows its tables look up.
        writes_alone: As `Strategy.writes_alone`.
    """

    def __init__(
        self,
        model: keras.Model,
        reductions: ReductionProbe,
        lookups: Lookups,
        writes_alone: bool = True,
    ) -> None:
        self.reductions, self.lookups = reductions, lookups
        self._writes_alone = writes_alone
        self._seeds = seeds_of(model)
        self._generator = global_generator()
        self._global_seeds = [] if self._generator is None else [self._generator.state]
        self._metrics = model.metrics_variables
        others = {id(v) for v in self._seeds + self._metrics}
        self._state = self._seeds + [v for v in model.variables if id(v) not in others]
        self._statistics = {id(v) for layer in batch_norm.layers_of(model) for v in layer.variables}

    def sees_whole_batches(self, replica: Replica) -> bool:
        """Tells whether a metric has to be updated with all shares together."""
        return replica.num_microbatches > 1 and bool(self.reductions.full_batch_metrics())

    def scope(self, replica: Replica) -> Scope:
        """The state as a replica finds it: its own seeds, and metrics that start from zero.

        Metrics that see whole batches go on from where they are, alike on every replica.
        """
        goes_on = self._metrics_that_go_on(replica)
        if self._generator is not None:
            use_global_generator(self._generator)  # the replica may be traced in another thread
        seeds = [(v, v + offset(v, replica.microbatch)) for v in self._seeds + self._global_seeds]
        metrics = [(v, tf.zeros(v.shape, v.dtype)) for v in self._metrics if id(v) not in goes_on]
        return Scope(seeds + metrics, collect_losses=True)

    @contextmanager
    def counting(self, scope: Scope, replica: Replica) -> Iterator[None]:
        """Within it metrics are updated, and count a share's rows alone, none that stands in."""
        before = [scope.get_current_value(v) for v in self._metrics]
        yield
        for variable, old in zip(self._metrics, before, strict=True):
            new = scope.get_current_value(variable)
            if new is not old:
                old = tf.convert_to_tensor(variable) if old is None else old
                scope.add_update((variable, replica.if_counted(new, old)))

    def changes(self, scope: Scope, replica: Replica) -> tuple[Changes, Changes]:
        """Returns what the forward pass changed: in the model's state, and in the metrics."""
        known = {id(v) for v in self._state + self._metrics}
        self._state += [v for i, v in scope.updated.items() if i not in known]
        state = Changes({}, {}, {})
        for place, variable, new in _assigned(scope, self._state):
            if place < len(self._seeds):
                state.same[place] = new - offset(variable, replica.microbatch)
            elif any(variable is seed for seed in self._global_seeds):
                # It moves by no fixed number: the first microbatch says where to.
                first = tf.cast(replica.microbatch == 0, tf.int64)
                state.averaged[place] = tf.cast(new, tf.int64) * first
            elif self._aggregation(variable, replica) is Reduction.SUM:
                state.added[place] = replica.if_counted(new - variable)
            elif keras.backend.is_float_dtype(variable.dtype):
                state.averaged[place] = _weighted(new, replica)
            else:  # a counter, which moves alike on every replica
                state.same[place] = new
        metrics, goes_on = Changes({}, {}, {}), self._metrics_that_go_on(replica)
        for place, variable, new in _assigned(scope, self._metrics):
            (metrics.same if id(variable) in goes_on else metrics.added)[place] = new
        return state, metrics

    def commit(self, changes: Changes) -> None:
        """Writes seeds, counters and statistics to one copy of the variables."""
        _write(self._state, changes)

    def commit_metrics(self, changes: Changes) -> tf.Tensor:
        """Moves the metrics' states in one copy; returns a tensor that is ready thereafter."""
        _write(self._metrics, changes)
        return tf.identity(self._metrics[-1].value) if self._metrics else tf.constant(0)

    def _metrics_that_go_on(self, replica: Replica) -> frozenset[int]:
        """Ids of the metrics' variables that are updated where they are, not from zero."""
        if replica.num_microbatches == 1 and self._writes_alone:  # nobody else adds anything
            return frozenset(id(v) for v in self._metrics)
        return self.reductions.full_batch_metrics()

    def _aggregation(self, variable: keras.Variable, replica: Replica) -> Reduction:
        # BatchNorm's moments of a share are averaged by rows: exact for the mean, and for both
        # with synchronised moments, which are alike on every replica.
        if replica.num_microbatches == 1 or id(variable) in self._statistics:
            return Reduction.MEAN
        return self.reductions.state_reduction(variable)


def nothing_like(value: Any, zero: int | tf.Tensor) -> Any:
    """Returns a tensor of zeros, or slices of no row, in the form of another and beside it.

    Args:
        value: Dense tensor or `tf.IndexedSlices`.
        zero: The number, int32; where it is not known before, TensorFlow takes no sum of zeros out
            of the loop over the steps, which Horovod would wait for in vain.
    """
    with tf.device(value.device):
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(value.values[:zero], value.indices[:zero], value.dense_shape)
        return tf.fill(tf.shape(value), tf.cast(zero, value.dtype))


def same_as(value: Any) -> Any:
    """Returns a dense tensor or `tf.IndexedSlices` as it is, by an operation beside it."""
    with tf.device(value.device):
        return tf.identity(value)


def offset(seed: keras.Variable, microbatch: int | tf.Tensor) -> tf.Tensor:
    """What a microbatch adds to a seed's state, `[seed, count]`, to draw numbers of its own."""
    number = tf.cast(microbatch, seed.dtype)
    return tf.stack([number * tf.cast(SEED_STRIDE, seed.dtype), tf.zeros((), seed.dtype)])


def _assigned(
    scope: Scope, variables: list[keras.Variable]
) -> Iterator[tuple[int, keras.Variable, Any]]:
    """Yields place, variable and new value of those that have one in a scope."""
    for place, variable in enumerate(variables):
        new = scope.assigned(variable)
        if new is not None:
            yield place, variable, new


def _weighted(new: tf.Tensor, replica: Replica) -> tf.Tensor:
    """A value of a microbatch by its rows among the batch's."""
    if replica.num_microbatches == 1:
        return new
    # Moments of no rows are NaN, which a weight of zero would not take out.
    return replica.if_counted(new * tf.cast(replica.fraction, new.dtype))


def _write(variables: list[keras.Variable], changes: Changes) -> None:
    for place, change in changes.added.items():
        variables[place].assign_add(change)
    for place, new in (changes.averaged | changes.same).items():
        variables[place].assign(new)
