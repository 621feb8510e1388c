"""What a forward pass changes besides gradients: metrics, moving statistics, and seeds.

A replica runs in a `keras.StatelessScope`, which keeps assignments aside. The resulting changes
are part of the replica's outputs, are summed together with the gradients, and are written to every
copy of the variables. So at any time any copy holds the state of all replicas, also where it is
saved or evaluated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.groups.fusion import grouped, packed_for_kernels
from tfdist.patches import batch_norm
from tfdist.replica.replica import Replica, StepOptions
from tfdist.replica.scope import Scope
from tfdist.rows import Reduction, Rows
from tfdist.upstream.keras_model import (
    global_generator,
    is_seed,
    metrics_of,
    metrics_variables_of,
    overrides,
    seeds_of,
    use_global_generator,
)
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_graphs import depends_on_inputs

#: Keeps the random numbers of replicas and rounds apart: a seed is increased by this times the
#: number of the microbatch. The first microbatch draws what one device draws.
SEED_STRIDE = 0x9E3779B9


class Changes(NamedTuple):
    """What a replica changes in a list of variables, by their place in the list.

    Attributes:
        added: Summed over the replicas, then added to the variable.
        averaged: New values weighted by rows; their sum over the replicas is the new value.
        same: New values that are the same on every replica and need no all-reduce.
    """

    added: dict[int, Any]
    averaged: dict[int, Any]
    same: dict[int, Any]

    def reduced_floats(self) -> Changes:
        """Returns the changes with all floating-point values among those that are all-reduced."""
        floats = {i: new for i, new in self.same.items() if new.dtype.is_floating}
        same = {i: new for i, new in self.same.items() if i not in floats}
        return Changes(self.added, self.averaged | floats, same)

    def zeros(self, zero: int | tf.Tensor, here: bool = False) -> Changes:
        """Returns zeros for everything that is all-reduced; arguments as of `zeros_beside`."""
        return Changes(
            {i: zeros_beside(change, zero, here) for i, change in self.added.items()},
            {i: zeros_beside(change, zero, here) for i, change in self.averaged.items()},
            self.same,
        )


class ForwardState:
    """The variables of a model that a forward pass may change, and how to combine the changes.

    Args:
        model: A built model.
        rows: Knows how the updates of user code combine, and what embeddings look up.
        options: The options of the step.
        writes_alone: As `VariableLayout.writes_alone`.
        bucket_bytes: As `GradientExchange.bucket_bytes`, for sharded variables.
    """

    def __init__(
        self,
        model: keras.Model,
        rows: Rows,
        options: StepOptions,
        writes_alone: bool = True,
        bucket_bytes: int | str | None = None,
    ) -> None:
        self.rows = rows
        self._writes_alone, self._replica_random = writes_alone, options.replica_random
        self._bucket_bytes = bucket_bytes
        self._seeds = seeds_of(model)
        self._generator = global_generator()
        self._global_seeds = [] if self._generator is None else [self._generator.state]
        self._metrics = metrics_variables_of(model)
        others = {id(v) for v in self._seeds + self._metrics}
        self._state = self._seeds + [v for v in model.variables if id(v) not in others]
        self._statistics = {id(v) for layer in batch_norm.layers_of(model) for v in layer.variables}

    def needs_full_batch(self, replica: Replica) -> bool:
        """Returns whether a metric has to be updated with the rows of all replicas together."""
        return replica.num_microbatches > 1 and bool(self.rows.reductions.full_batch_metrics())

    def scope(self, replica: Replica) -> Scope:
        """Returns the scope for a replica, with metrics that start at zero.

        Metrics that need full batches start from their current values, alike on every replica.
        """
        continued = self._continued_metrics(replica)
        if self._generator is not None:
            use_global_generator(self._generator)  # the replica may be traced in another thread
        seeds = []
        if self._replica_random:
            all_seeds = self._seeds + self._global_seeds
            seeds = [(v, v + offset(v, replica.microbatch)) for v in all_seeds]
        zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in self._metrics if id(v) not in continued]
        scope = Scope(seeds + zeros, bucket_bytes=self._bucket_bytes, collect_losses=True)
        scope.sums = frozenset(id(v) for v, _ in zeros)
        return scope

    @contextmanager
    def counting(self, scope: Scope, replica: Replica) -> Iterator[None]:
        """Returns a context in which metrics count a replica's rows, but no padding."""
        before = [scope.get_current_value(v) for v in self._metrics]
        yield
        for variable, old in zip(self._metrics, before, strict=True):
            new = scope.get_current_value(variable)
            if new is not old:
                old = tf.convert_to_tensor(variable) if old is None else old
                scope.add_update((variable, replica.if_counted(new, old)))

    def changes(self, scope: Scope, replica: Replica) -> tuple[Changes, Changes]:
        """Returns what the forward pass changed in the model's state, and in the metrics."""
        listed = {id(v) for v in self._state + self._metrics}
        self._state += [v for i, v in scope.updated.items() if i not in listed]
        state = Changes({}, {}, {})
        for index, variable, new in _assigned(scope, self._state):
            if index < len(self._seeds):
                is_random = self._replica_random
                state.same[index] = new - offset(variable, replica.microbatch) if is_random else new
            elif any(variable is seed for seed in self._global_seeds):
                # It does not move by a fixed number: the first microbatch decides.
                first = tf.cast(replica.microbatch == 0, tf.int64)
                state.averaged[index] = tf.cast(new, tf.int64) * first
            elif is_seed(variable):  # of a metric or a loss: it moves alike on every replica
                state.same[index] = new
            elif self._reduction(variable, replica, scope) is Reduction.SUM:
                state.added[index] = replica.if_counted(new - variable)
            elif keras.backend.is_float_dtype(variable.dtype):
                # By rows. Moments of no rows are NaN, and stay NaN when multiplied by zero.
                if replica.num_microbatches > 1:
                    new = replica.if_counted(replica.by_rows(new))
                state.averaged[index] = new
            else:  # a counter, which changes alike on every replica
                state.same[index] = new
        metrics, continued = Changes({}, {}, {}), self._continued_metrics(replica)
        for index, variable, new in _assigned(scope, self._metrics):
            (metrics.same if id(variable) in continued else metrics.added)[index] = new
        return state, metrics

    def commit(self, changes: Changes, only_finite: bool = False) -> None:
        """Writes seeds, counters, and statistics to one copy of the variables.

        Args:
            changes: Summed over the replicas.
            only_finite: Whether to leave out numbers that are not finite. With loss scaling, the
                forward pass may overflow in a step that is skipped.
        """
        _write(self._state, changes, only_finite)

    def commit_metrics(self, changes: Changes) -> tf.Tensor:
        """Updates one copy of the metrics; returns a tensor that is ready once that is done."""
        _write(self._metrics, changes)
        return tf.identity(self._metrics[-1].value) if self._metrics else tf.constant(0)

    def _continued_metrics(self, replica: Replica) -> frozenset[int]:
        """Returns the ids of metrics' variables that continue from their values, not from zero."""
        if replica.num_microbatches == 1 and self._writes_alone:  # nothing else is added
            return frozenset(id(v) for v in self._metrics)
        return self.rows.reductions.full_batch_metrics()

    def _reduction(self, variable: keras.Variable, replica: Replica, scope: Scope) -> Reduction:
        # BatchNorm's moments of each replica are averaged by rows. That is exact for the mean, and
        # for both with synchronized moments, which are the same on every replica.
        if replica.num_microbatches == 1 or id(variable) in self._statistics:
            return Reduction.MEAN
        if (of_rows_too := scope.alike.get(id(variable))) is None:
            return self.rows.reductions.state_reduction(variable)
        if of_rows_too:
            raise UnsupportedModelError(
                f"{variable.path!r} is updated by the model's call and by a loss of the full "
                "batch, so tfdist cannot combine the updates of replicas. Update it in one of the "
                "two, or use one device."
            )
        return Reduction.MEAN


def zeros_beside(value: Any, zero: int | tf.Tensor, here: bool = False) -> Any:
    """Returns zeros with the shape and on the device of another tensor; of slices, no rows.

    Args:
        value: Dense tensor or `tf.IndexedSlices`.
        here: Whether to put them on the current device instead.
        zero: The number 0, int32. If it is a tensor of unknown value, TensorFlow cannot move an
            all-reduce of zeros out of the loop over the steps, where Horovod would time out.
    """
    with nullcontext() if here else tf.device(value.device):
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(value.values[:zero], value.indices[:zero], value.dense_shape)
        return tf.fill(tf.shape(value), tf.cast(zero, value.dtype))


def copied(value: Any, zero: int | tf.Tensor) -> Any:
    """Returns a dense tensor or `tf.IndexedSlices` by an identity operation on its device.

    Args:
        value: The dense tensor or the slices.
        zero: The number 0, int32. If it is a tensor of unknown value, the indices are not constant.
            TensorFlow would gather constants while it optimizes the graph, which the other ranks,
            whose slices have no rows, do not.
    """
    with tf.device(value.device):
        if isinstance(value, tf.IndexedSlices):
            indices = value.indices + tf.cast(zero, value.indices.dtype)
            return tf.IndexedSlices(tf.identity(value.values), indices, value.dense_shape)
        return tf.identity(value)


def offset(seed: keras.Variable, microbatch: int | tf.Tensor) -> tf.Tensor:
    """Returns what a microbatch adds to a seed's state, `[seed, count]`, for its own numbers."""
    number = tf.cast(microbatch, seed.dtype)
    return tf.stack([number * tf.cast(SEED_STRIDE, seed.dtype), tf.zeros((), seed.dtype)])


def _assigned(
    scope: Scope, variables: list[keras.Variable]
) -> Iterator[tuple[int, keras.Variable, Any]]:
    """Yields place, variable, and new value of the variables that were assigned in a scope."""
    for index, variable in enumerate(variables):
        new = scope.assigned(variable)
        if new is not None:
            yield index, variable, new


def _write(variables: list[keras.Variable], changes: Changes, only_finite: bool = False) -> None:
    new, added = changes.averaged | changes.same, changes.added
    if only_finite:
        new = _finite(new, lambda i, _: tf.convert_to_tensor(variables[i]))
        added = _finite(added, lambda _, change: tf.zeros_like(change))
    for index, change in added.items():
        variables[index].assign_add(change)
    for index, value in new.items():
        variables[index].assign(value)


def _finite(values: dict[int, Any], instead: Callable[[int, Any], tf.Tensor]) -> dict[int, Any]:
    """Returns values, with those of `instead` for floating-point numbers that are not finite."""
    floats = {}
    for i, value in values.items():
        if value.dtype.is_floating:
            old = tf.cast(instead(i, value), value.dtype)
            floats[i] = tf.ensure_shape(value, old.shape), old

    def select(pairs: list[tuple[tf.Tensor, tf.Tensor]]) -> list[tf.Tensor]:
        with tf.device(pairs[0][1].device):
            both = zip(*pairs, strict=True)
            (new, apart), (old, _) = (packed_for_kernels(list(one)) for one in both)
            few = zip(new, old, strict=True)
            return apart([tf.where(tf.math.is_finite(n), n, o) for n, o in few])

    selected = grouped(lambda pair: pair[1].device, select, list(floats.values()))
    return values | dict(zip(floats, selected, strict=True))


class MetricResults:
    """Returns the logs of Keras's own steps, in the graph or outside of it.

    Keras's steps return what `compute_metrics` returns for the batch. It is what
    `get_metrics_result` returns, unless an override adds entries. Entries that are computed from
    metrics (a root of a mean) are computed after the step, from the metrics of all replicas.
    Entries that are computed from the batch itself need a custom step.
    """

    def __init__(self, model: keras.Model, element_spec: Any) -> None:
        self._model = model
        self._of_batch: tuple[Any, ...] | None = None
        if overrides(model, "compute_metrics"):
            specs = _with_outputs(model, element_spec)
            self._of_batch = tf.nest.map_structure(  # one row of zeros
                lambda s: s and tf.zeros([size or 1 for size in s.shape], s.dtype), specs
            )

    def __call__(self) -> dict[str, Any]:
        """Returns the metrics over all steps since their last reset."""
        results = self._model.get_metrics_result()
        if self._of_batch is None:
            return results
        logs = self._computed(*self._of_batch)
        return results if logs.keys() == results.keys() else logs

    def need_batch(self) -> bool:
        """Returns whether a result that is not one of the metrics is computed from the batch."""
        if self._of_batch is None:
            return False
        spec = tf.nest.map_structure(tf.type_spec_from_value, self._of_batch)
        function = tf.function(self._computed, autograph=False).get_concrete_function(*spec)
        keys = function.structured_outputs.keys()
        return keys != self._model.get_metrics_result().keys() and depends_on_inputs(function)

    def _computed(self, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, Any]:
        """Returns what `compute_metrics` returns for the metrics as they are."""
        with ExitStack() as stack:
            for metric in metrics_of(self._model):
                stack.enter_context(replaced(metric, "update_state", lambda *_, **__: None))
            stack.enter_context(keras.StatelessScope())
            return self._model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _with_outputs(model: keras.Model, element_spec: Any) -> tuple[Any, ...]:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(element_spec)

    def outputs(inputs: Any) -> Any:
        with keras.StatelessScope():
            return model(inputs, training=False)

    traced = tf.function(outputs, autograph=False).get_concrete_function(x)
    spec = tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs)
    return x, y, spec, weight


def flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs with nested dictionaries, as of a metric's results, flattened as Keras does."""
    parts = [flat(v) if isinstance(v, Mapping) else {name: v} for name, v in logs.items()]
    return functools.reduce(lambda a, b: a | b, parts, {})
