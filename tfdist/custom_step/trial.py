"""What a custom step does: found by a trial run, outside of any graph, and in a traced graph.

The trial changes no variable. The graph shows how the replicas' results are combined.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.custom_step.scope import CustomStepScope, LocalRun, patched_for_custom_step
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.patches import batch_norm
from tfdist.replica.program_state import python_state_kept
from tfdist.rows import NotReducibleError, Reduction, Reductions, TracedForward, refused_assignment
from tfdist.step.loss_scaling import Scaling
from tfdist.strategies import batches
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_model, keras_optimizers
from tfdist.upstream.keras_losses import losses_of_one_device
from tfdist.upstream.tensorflow_graphs import calls_python
from tfdist.upstream.tensorflow_runtime import variables_assigned_by

#: A `train_step` or `test_step` of a model.
StepFn = Callable[[Any], Any]


class BuiltStep(NamedTuple):
    """What the trial run of a step showed.

    Attributes:
        variables: All variables that the step may change.
        logs: The shapes of its results, by name.
    """

    variables: list[keras.Variable]
    logs: dict[str, tuple[int, ...]]


def build(model: keras.Model, strategy: Strategy, name: str, batch: Any) -> BuiltStep:
    """Creates what a step uses: weights, states of metrics, and of each optimizer that it applies.

    Only the step itself knows all of them: a GAN has no `call`, and two optimizers.

    Raises:
        ConfigurationError: An optimizer was created outside of the scope.
        UnsupportedModelError: The step assigns to a `tf.Variable`, or reads an iterator that cannot
            be set back.
    """
    with strategy.scope():
        values = [(v, tf.convert_to_tensor(v)) for v in _variables_of(model)]
        scope = CustomStepScope(values, LocalRun(), {}, trial=True)
        with (
            scope,  # exited last: only then new variables get their initial values
            patched_for_custom_step(model),
            losses_of_one_device(),
            batch_norm.fixed_moments(model),
            variables_assigned_by(_refused),
            tf.summary.record_if(False),
            python_state_kept(model) as state,
        ):
            if state and state.lost:
                raise UnsupportedModelError(
                    f"{type(model).__name__} reads a {state.lost[0]} that cannot be set back after "
                    "a trial of its step. Pass all data to fit (tf.data.Dataset.zip), or keep an "
                    "iterator over data without Python code and with a seed, outside of containers."
                )
            logs = getattr(model, name)(batch)
        unbuilt = [optimizer for optimizer, _ in scope.unbuilt]
        for optimizer in [*keras_optimizers.optimizers_of(model), *unbuilt]:
            if not all(strategy.variables.owns(v.value) for v in optimizer.variables):
                raise ConfigurationError(
                    f"The optimizer {optimizer.name!r} was created outside of build_model, so its "
                    "variables are not on the replicas. Create it inside of build_model."
                )
        for optimizer, variables in scope.unbuilt:
            if not optimizer.built:
                optimizer.build(variables)
    changed = [*_variables_of(model), *scope.updated.values()]
    changed += [v for optimizer, _ in scope.unbuilt for v in optimizer.variables]
    shapes = {name: tuple(np.shape(value)) for name, value in flat_logs(logs).items()}
    return BuiltStep(list({id(v): v for v in changed}.values()), shapes)


def _refused(variable: tf.Variable, *_: Any, **__: Any) -> None:
    raise refused_assignment("step", variable)


def _variables_of(model: keras.Model) -> list[keras.Variable]:
    # Not created before the step uses it: it draws its seed from Python's generator, as do the
    # initializers of weights that the step creates.
    generator = keras_model.global_generator()
    variables = [*model.variables, *keras_model.recurrent_states(model)]
    variables += [] if generator is None else [generator.state]
    for part in (*keras_model.metrics_of(model), *keras_optimizers.optimizers_of(model)):
        is_optimizer = isinstance(part, keras.optimizers.Optimizer)
        variables += keras_optimizers.variables_of(part) if is_optimizer else part.variables
    return variables


def flat_logs(logs: Any) -> dict[str, Any]:
    """Returns the results of a step as Keras logs them, with nested dictionaries flattened.

    Raises:
        UnsupportedModelError: They are not a dictionary.
    """
    flat: dict[str, Any] = {}
    for name, value in (logs or {}).items() if isinstance(logs or {}, dict) else [("", logs)]:
        if isinstance(value, dict):
            flat |= flat_logs(value)
            continue
        if not name:
            raise UnsupportedModelError(
                f"The step returns {type(value).__name__!r}. Return a dictionary of its logs."
            )
        flat[name] = value
    return flat


# ---- how the replicas' results are combined ----
# The step is traced on a batch with any number of rows, and never run; so the reductions hold for
# all weights and rows. The gradients of a loss that is a mean over rows are means, too, so it is
# the loss that is analyzed and not its gradients. From there on, gradients are what all replicas
# have after the all-reduce: the same numbers. So are the results of metrics.


class TracedStep:
    """The traced step, and the reductions that follow from it.

    Attributes:
        num_gradients: How often the step computes gradients.
        assigned: Variables to which it assigns.

    Raises:
        NotReducibleError: The step cannot be traced, or its loss contains gradients of weights.
            From methods: something is neither a mean nor a sum, or not known to be.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Sequence[keras.Variable],
        step: StepFn,
        scalings: Mapping[int, Scaling],
        batch: Any,
    ) -> None:
        if getattr(model, "run_eagerly", False):
            raise NotReducibleError("run_eagerly=True lets it do what a graph does not show")
        metrics = [v for m in keras_model.metrics_of(model) for v in m.variables]
        run = _TracingRun({id(v) for v in metrics})

        def compute(rows: Any) -> None:
            values = [(v, tf.identity(tf.convert_to_tensor(v))) for v in variables]
            run.starts = {id(v): value for v, value in values}
            scope = CustomStepScope(values, run, scalings, trial=True)
            with scope, patched_for_custom_step(model), losses_of_one_device():
                logs = flat_logs(step(rows))
                self._logs = {name: tf.convert_to_tensor(log) for name, log in logs.items()}
                for variable in metrics:
                    run.end_of_metric(scope, variable)
            self._scope, self._ends = scope, dict(scope.state_mapping)

        try:
            # The graph lives as long as the traced forward pass.
            self._traced = TracedForward(
                model, batch, training=True, compute=compute, same=run.same
            )
        except ValueError as error:
            raise NotReducibleError(str(error)) from error
        if calls_python(self._traced.operations):
            raise NotReducibleError(
                "it calls Python, or reads or writes data, as one device does, once per step"
            )
        if run.inner:
            raise NotReducibleError("its loss contains gradients of weights")
        self._run, self._reductions = run, Reductions(self._traced.analysis)
        self._statistics = {id(v) for layer in batch_norm.layers_of(model) for v in layer.variables}
        self.num_gradients = len(run.targets)
        self.assigned = list(self._scope.updated.values())

    def gradient(self, number: int) -> Reduction:
        """Returns the reduction of the gradients that the step computes as the n-th ones."""
        if (targets := self._run.targets[number]) is None:
            raise NotReducibleError(f"its gradient number {number} is of more than a loss")
        return self._reductions.of(f"its gradient number {number}", targets)

    def alike(self, number: int) -> frozenset[int]:
        """Returns the places of variables whose n-th gradient has the same slices anywhere."""
        what = f"the lookup of its gradient number {number}"
        by_place = self._run.indices[number]
        return frozenset(i for i in by_place if self._reductions.are_alike(what, by_place[i]))

    def log(self, name: str) -> Reduction:
        """Returns the reduction of a log."""
        log = self._logs[name]
        if any(log is result for result in self._scope.results):
            return Reduction.SAME
        return self._reductions.of(f"its log {name!r}", [log])

    def state(self, variable: keras.Variable) -> Reduction:
        """Returns the reduction of the change of a variable."""
        key, is_float = id(variable), variable.value.dtype.is_floating
        what = f"the update of {variable.path!r}"
        if key in self._statistics:  # each replica's own by definition
            return Reduction.MEAN
        if key in self._run.changes:
            return self._reductions.of_additions(what, self._run.changes[key], is_float)
        if key not in self._run.starts:
            raise NotReducibleError(f"{what} happens in some steps only")
        new = self._ends[key]
        if self._reductions.is_plain(new):
            # The update of an optimizer is the same on all replicas, as are integers.
            is_same = key in self._scope.by_optimizers or not is_float
            return Reduction.SAME if is_same else Reduction.MEAN
        return self._reductions.of_change(what, self._run.starts[key], new)


class _TracingRun(LocalRun):
    """The run of a step that is traced: notes what the replicas of a real run would exchange.

    Attributes:
        targets: What the step differentiates, for each gradient; None if that is not all.
        indices: Indices of the gradients that are `tf.IndexedSlices`, by place, for each gradient.
        same: Tensors that are the same on all replicas after an exchange.
        inner: Whether a loss contains gradients of variables.
        starts: Values of variables at the beginning, and of metrics after their last result, by id.
        changes: Values of the metrics' variables before and after the step's updates, by id.
    """

    def __init__(self, metrics: Collection[int]) -> None:
        self._metrics = metrics
        self.targets: list[list[tf.Tensor] | None] = []
        self.indices: list[dict[int, tf.Tensor]] = []
        self.same: list[tf.Tensor] = []
        self.inner = False
        self.starts: dict[int, tf.Tensor] = {}
        self.changes: dict[int, list[tuple[tf.Tensor, tf.Tensor]]] = {}

    def gradients(
        self, compute: Callable[..., list], inner: bool, targets: list[tf.Tensor] | None
    ) -> list:
        self.inner |= inner
        gradients = compute()
        slices = {i: g for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)}
        self.indices.append({place: each.indices for place, each in slices.items()})
        self.targets.append(targets)
        return [None if g is None else self._exchanged(g) for g in gradients]

    def result(
        self, scope: CustomStepScope, metric: keras.Metric, compute: Callable[[], Any]
    ) -> Any:
        for variable in metric.variables:
            self.end_of_metric(scope, variable)
        return tf.nest.map_structure(self._exchanged, compute())

    def end_of_metric(self, scope: CustomStepScope, variable: keras.Variable) -> None:
        """Notes the change of a metric's variable, which begins at another value from here on."""
        key = id(variable)
        if key not in self._metrics or key not in scope.pending:
            return
        self.changes.setdefault(key, []).append((self.starts[key], scope.state_mapping[key]))
        scope.state_mapping[key] = self.starts[key] = self._exchanged(scope.state_mapping[key])
        scope.pending.discard(key)

    def _exchanged(self, value: Any) -> Any:
        """Returns a tensor as it is after an exchange: the same on all replicas."""
        if isinstance(value, tf.IndexedSlices):
            values, indices = self._exchanged(value.values), self._exchanged(value.indices)
            return tf.IndexedSlices(values, indices, value.dense_shape)
        value = tf.identity(value)
        self.same.append(value)
        return value


@dataclass
class ReductionPlan:
    """The reductions of everything that a custom step computes.

    Attributes:
        logs: Those of the step's results, by name.
        full_batch_reason: Why every replica computes the full batch; None if each computes its
            own part of it.
        gradients: Those of gradients, in the order in which the step computes them.
        alike: For each gradient, the places of variables for which all replicas look up the same
            rows, so that the batch has these slices once. Other slices are concatenated.
        states: Those of the changes of variables, by id.
    """

    logs: dict[str, Reduction]
    full_batch_reason: str | None = None
    gradients: list[Reduction] = field(default_factory=list)
    alike: list[frozenset[int]] = field(default_factory=list)
    states: dict[int, Reduction] = field(default_factory=dict)

    @classmethod
    def of_full_batch(cls, logs: Iterable[str], reason: str | None) -> ReductionPlan:
        """Returns the plan of a step that every replica computes for the full batch."""
        return cls(dict.fromkeys(logs, Reduction.SAME), reason)

    def digest(self) -> float:
        """Returns a checksum, to compare the plans of workers, which may have different rows."""
        kinds = [*self.logs.items(), *self.gradients, *self.states.values()]
        alike = [sorted(places) for places in self.alike]
        return float(zlib.crc32(repr((self.full_batch_reason is None, kinds, alike)).encode()))


def infer_reductions(
    model: keras.Model, built: BuiltStep, step: StepFn, scalings: Mapping[int, Scaling], batch: Any
) -> ReductionPlan:
    """Infers the reductions of a step.

    Raises:
        UnsupportedModelError: The step is not supported in full-batch mode either.
    """
    try:
        if reason := batches.uneven(batch):
            raise NotReducibleError(reason)
        if any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(batch)):
            raise NotReducibleError("its input is sparse")
        traced = TracedStep(model, built.variables, step, scalings, batch)
        return ReductionPlan(
            {name: traced.log(name) for name in built.logs},
            gradients=[traced.gradient(i) for i in range(traced.num_gradients)],
            alike=[traced.alike(i) for i in range(traced.num_gradients)],
            states={id(variable): traced.state(variable) for variable in traced.assigned},
        )
    except NotReducibleError as error:
        return ReductionPlan.of_full_batch(built.logs, error.reason)
